"""`python -m experiments.benchmarks.blocks`: the speed per live score in small blocks, compared with blocks of 128."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from experiments.benchmarks.harness import Bench, Commit, Device, Out, Rounds, chosen
from experiments.benchmarks.interpreter import run_kernels_on
from experiments.measurements import Measurement

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

# The results of two tilings differ in the order of summation, so by roundings of half precision.
CLOSE = 0.02


@app.command()
def main(
    dim: Annotated[list[int] | None, typer.Option(help="Head dim; may be repeated.", show_default="64, 128")] = None,
    mask: Annotated[list[str] | None, typer.Option(help="May be repeated.", show_default="four kinds")] = None,
    block: Annotated[
        list[int] | None, typer.Option(help="Tokens; may be repeated; 128 is always timed.", show_default="64, 32, 16")
    ] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="forward, dq or dk_dv; may be repeated.")] = None,
    every: Annotated[
        bool, typer.Option("--every", help="All tilings there are to choose from, which takes some times as long.")
    ] = False,
    config: Annotated[
        list[str] | None,
        typer.Option(help="Time this one too, as in experiments.benchmarks.tune: 64x64x4x3; may be repeated."),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens.")] = 16384,
    rounds: Rounds = 2,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = Path("runs/blocks"),
) -> None:
    """Time forward, dQ and dK/dV in the tiles of the mask and in those that the plan chooses.

    speed: live scores per second, relative to the same kind of mask in blocks of 128. Ends with 1 if a tiling gives
    other results than the mask's own tiles. Two minutes on an H100, most of them compiling; --every takes about five.
    """
    run_kernels_on(device)  # before Triton's kernels are imported
    from experiments.benchmarks.blocks.measuring import BLOCKS, KERNELS, KINDS, Kernels
    from experiments.benchmarks.tune.space import configs_of

    kernels, kinds = chosen("--kernel", kernel, KERNELS), chosen("--mask", mask, KINDS)
    blocks = [128, *(b for b in chosen("--block", block, BLOCKS) if b != 128)]
    configs = configs_of(config)
    bench = Bench.start("blocks", device, commit, out, rounds=rounds, round_ms=15.0)
    for d in dim or (64, 128):
        subject = Kernels(d, length, bench.device)
        for kind in kinds:
            for size in blocks:
                small = size < 128
                subject.measure(
                    bench, kind, size, every=every and small, configs=configs if small else (), kernels=kernels
                )
    bench.finish()
    print(*speeds(bench.measurements), sep="\n")
    wrong = [each for each in bench.measurements if not each.settings["difference"] <= CLOSE]
    for each in wrong:
        print(f"WRONG: {each.name}: {each.settings['difference']:.3g}")
    if wrong:
        raise typer.Exit(1)


def speeds(measurements: Sequence[Measurement]) -> list[str]:
    """For each measurement: live scores per second relative to blocks of 128 in the chosen tiling, the target for this
    ratio, and the predicted cost relative to the chosen tiling.
    """
    from experiments.benchmarks.blocks.measuring import CHOSEN, TARGETS

    of_chosen = {each.name: each for each in measurements if each.way == CHOSEN}
    lines = []
    for each in measurements:
        assert each.value is not None
        benchmark, kind, dim, block, kernel, way = each.name.split("/")
        whole = of_chosen["/".join((benchmark, kind, dim, "128", kernel, CHOSEN))]
        here = of_chosen["/".join((benchmark, kind, dim, block, kernel, CHOSEN))]
        assert whole.value is not None
        speed = each.settings["kept"] / each.value * whole.value / whole.settings["kept"]
        cost = each.settings["predicted"] / here.settings["predicted"]
        lines.append(
            f"{kind} D={dim}, blocks of {block}, {kernel}, {way} ({each.settings['tiling']}, "
            f"{each.settings['config']}): speed {speed:.2f} of blocks of 128, wanted {TARGETS[int(block)]:.2f}; "
            f"cost {cost:.2f}"
        )
    return lines


if __name__ == "__main__":
    app()

"""`python -m experiments.benchmarks.tune`: tile sizes compiled, timed and checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from experiments.benchmarks.harness import Bench, Commit, Out, Rounds, chosen
from experiments.benchmarks.interpreter import compile_kernels

if TYPE_CHECKING:
    from experiments.benchmarks.tune.compiling import Compiled
    from experiments.benchmarks.tune.space import Target

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()

SHIPPED = "of the shipped configuration's time"  # the unit of a candidate's time, its mean over the masks
CHECKED = 3  # of the fastest candidates


@app.command()
def main(
    kernel: Annotated[list[str] | None, typer.Option(help="forward, dk_dv or dq; may be repeated.")] = None,
    arithmetic: Annotated[list[str] | None, typer.Option(help="half, tf32 or fp32; may be repeated.")] = None,
    dim: Annotated[list[int] | None, typer.Option(help="Head dim, padded to a power of two; may be repeated.")] = None,
    loads: Annotated[
        list[str] | None, typer.Option(help="descriptors or pointers; may be repeated.", show_default="both")
    ] = None,
    arch: Annotated[
        int | None, typer.Option(help="90 for compute capability 9.0.", show_default="of the GPU here, or 90")
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            help="Try only this one, as queries x keys x warps x stages: 64x128x8x2; then x registers, if limited, and "
            "q, if queries are multiplied from registers: 64x64x4x3x128q; may be repeated. It is timed even if it "
            "spills.",
            show_default="all that may fit",
        ),
    ] = None,
    mask: Annotated[
        list[str] | None, typer.Option(help="To time under; may be repeated.", show_default="six kinds")
    ] = None,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Needs no GPU: what may be timed.")] = False,
    length: Annotated[int, typer.Option(help="Tokens of the timed masks.")] = 16384,
    rounds: Rounds = 3,
    round_ms: Annotated[float, typer.Option(help="Milliseconds of a turn.")] = 30.0,
    workers: Annotated[int | None, typer.Option(help="Processes that compile.", show_default="all cores")] = None,
    commit: Commit = None,
    out: Out = Path("runs/tune"),
) -> None:
    """Find tile sizes for the kernels.

    Candidates are compiled; those that spill registers or serialise their matrix instructions are dropped; the others
    are timed under six masks in turns with the shipped configuration. The fastest that is exact is reported.
    """
    compile_kernels()
    import torch

    from experiments.benchmarks.speed.patterns import PLAIN_KINDS
    from experiments.benchmarks.tune.compiling import compile_candidates
    from experiments.benchmarks.tune.measuring import KINDS
    from experiments.benchmarks.tune.space import ARITHMETICS, DIMS, KERNELS, Target, candidates, configs_of
    from experiments.measurements import current_run
    from experiments.training.environment import command_line
    from experiments.training.progress_bar import counting_bar
    from sparseflash.backends.triton.architecture import architecture_of

    both = ("descriptors", "pointers")
    known = {"kernel": KERNELS, "arithmetic": ARITHMETICS, "dim": DIMS, "loads": both, "mask": PLAIN_KINDS}
    given = {"kernel": kernel, "arithmetic": arithmetic, "dim": dim, "loads": loads, "mask": mask}
    for name, values in known.items():
        chosen(f"--{name}", given[name], values)
    named = configs_of(config)
    if not compile_only and not torch.cuda.is_available():
        raise typer.BadParameter("there is no GPU to time on; --compile-only needs none")
    if arch is None:
        major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
        arch = 10 * major + minor
    targets = [
        Target(k, a, d, way == "descriptors")  # type: ignore[arg-type]
        for k in kernel or KERNELS
        for a in arithmetic or ("half",)
        for d in dim or (64, 128)
        for way in loads or both
        if way == "pointers" or architecture_of(divmod(arch, 10)).has_tma
    ]
    if not targets:
        raise typer.BadParameter("nothing is left to tune: before sm_90 there are no descriptors")
    wanted = {target: named or candidates(target) for target in targets}
    total = sum(map(len, wanted.values()))
    with counting_bar(console, f"Compiling for sm_{arch}", total) as progress:
        compiled = compile_candidates(
            wanted,
            arch,
            architecture_of(divmod(arch, 10)).shared_memory,
            spills=bool(named),
            workers=workers,
            progress=progress,
        )
    run = current_run(torch.device("cpu" if compile_only else "cuda"), command_line("experiments.benchmarks.tune"),
                      commit=commit)  # fmt: skip
    bench = Bench("tune", run, out, torch.device("cpu" if compile_only else "cuda"), rounds=rounds, round_ms=round_ms)
    for target in targets:
        found = [each for each in compiled if each.target == target]
        good = [each for each in found if not each.why]
        for each in found:
            if each.why:
                bench.add(_path(each), None, SHIPPED, failure=each.why, **_registers(each))
            elif compile_only and each.report is not None:
                bench.add(_path(each), float(each.report.registers), "registers", spilled=each.report.spilled)
        console.print(f"{target}: {len(good)} of {len(found)} candidates compile as they should")
        if good and not compile_only:
            _time(bench, target, good, tuple(mask or KINDS), length)
        bench.save()
    bench.finish()


def _path(each: Compiled) -> str:
    target = each.target
    loads = "descriptors" if target.descriptors else "pointers"
    return f"{target.kernel}/{target.arithmetic}/{target.dim}/{each.config}-{loads}"


def _registers(each: Compiled) -> dict[str, Any]:
    return {} if each.report is None else {"registers": each.report.registers, "spilled": each.report.spilled}


def _time(bench: Bench, target: Target, good: list[Compiled], masks: tuple[str, ...], length: int) -> None:
    """Times the candidates of a target, checks the fastest, and reports the first that is exact."""
    import torch

    from experiments.benchmarks.tune.measuring import Candidates
    from experiments.training.progress_bar import counting_bar
    from sparseflash.backends.triton.architecture import architecture_of

    capability = torch.cuda.get_device_capability()
    candidates = Candidates(target, length, bench.device, masks)
    with counting_bar(console, str(target), len(masks)) as progress:
        measured = candidates.ratios(
            [each.config for each in good], rounds=bench.rounds, round_ms=bench.round_ms, progress=progress
        )
    of_config = {each.config: each for each in good}
    best = None
    for number, each in enumerate(measured):
        error = candidates.error(each.config) if number < CHECKED and best is None else None
        settings = _registers(of_config[each.config]) | {"ratios": each.ratios}
        bench.add(
            _path(of_config[each.config]), each.mean, SHIPPED, **settings, **({} if error is None else {"error": error})
        )
        if error is not None and error <= 1:  # False for NaN
            best = each
    if best is not None:
        shipped = architecture_of(capability).tables.of(target.descriptors)[
            target.kernel, target.arithmetic, target.dim
        ]
        console.print(f"{target}: {best.config} takes {best.mean:.3f} of the time of {shipped}")


if __name__ == "__main__":
    app()

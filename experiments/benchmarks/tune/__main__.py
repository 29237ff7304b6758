"""`python -m experiments.benchmarks.tune`: tile sizes compiled, timed, checked and, if they are better, written."""

from __future__ import annotations

import csv
import platform
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.harness import chosen
from experiments.benchmarks.interpreter import compile_kernels

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()

WORTH = 0.98  # a candidate replaces the shipped configuration if it takes at most this part of its time


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
    rounds: Annotated[int, typer.Option(help="Turns that each candidate takes under each mask.")] = 3,
    round_ms: Annotated[float, typer.Option(help="Milliseconds of a turn.")] = 30.0,
    workers: Annotated[int | None, typer.Option(help="Processes that compile.", show_default="all cores")] = None,
    out: Annotated[Path, typer.Option(help="Where tune.csv goes.")] = Path("runs/tune"),
    write: Annotated[bool, typer.Option("--write", help="Put what is faster into configs.py.")] = False,
) -> None:
    """Find tile sizes for the kernels. A candidate is compiled; one that spills registers or whose matrix instructions
    wait for one another is dropped; the others are timed under six masks in turns with the shipped configuration; the
    fastest that passes the exactness check is reported, and written with --write."""
    compile_kernels()
    import torch

    from experiments.benchmarks.speed.patterns import KINDS as EVERY_MASK
    from experiments.benchmarks.tune.compiling import compile_candidates
    from experiments.benchmarks.tune.measuring import KINDS
    from experiments.benchmarks.tune.space import ARITHMETICS, DIMS, KERNELS, Target, candidates, configs_of
    from experiments.training.progress_bar import counting_bar
    from sparseflash.backends.triton.shared_memory import shared_memory

    both = ("descriptors", "pointers")
    known = {"kernel": KERNELS, "arithmetic": ARITHMETICS, "dim": DIMS, "loads": both, "mask": EVERY_MASK}
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
        if not (way == "descriptors" and arch < 90)
    ]
    if not targets:
        raise typer.BadParameter("nothing is left to tune: before sm_90 there are no descriptors")
    wanted = {target: named or candidates(target) for target in targets}
    total = sum(map(len, wanted.values()))
    with counting_bar(console, f"Compiling for sm_{arch}", total) as progress:
        compiled = compile_candidates(
            wanted, arch, shared_memory(arch), spills=bool(named), workers=workers, progress=progress
        )
    rows: dict[Any, dict[str, Any]] = {
        (each.target, each.config): each.target._asdict()
        | each.config._asdict()
        | {"dropped": each.why, "ratio": "", "error": ""}
        | ({"used registers": each.report.registers, "spilled": each.report.spilled} if each.report else {})
        for each in compiled
    }
    out.mkdir(parents=True, exist_ok=True)
    good = {target: [each.config for each in compiled if each.target == target and not each.why] for target in targets}
    for target, configs in good.items():
        console.print(f"{target}: {len(configs)} of {len(wanted[target])} candidates compile as they should")
    if not compile_only:
        _time(good, tuple(mask or KINDS), length, rounds, round_ms, write, rows)
    path = out / "tune.csv"
    with open(path, "w", newline="") as file:
        names = list(dict.fromkeys(name for row in rows.values() for name in row))
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows.values())
    console.print(f"All candidates: {path}", soft_wrap=True)


def _time(
    good: Any, masks: tuple[str, ...], length: int, rounds: int, round_ms: float, write: bool, rows: dict[Any, Any]
) -> None:
    """Times the candidates of each target, checks the fastest, and reports."""
    import torch

    from experiments.benchmarks.tune.measuring import Bench
    from experiments.benchmarks.tune.table import shipped, write_entry
    from experiments.training.progress_bar import counting_bar

    device = torch.device("cuda")
    capability = torch.cuda.get_device_capability()
    title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("target", "shipped", "fastest", "time over shipped", *masks, "error"):
        table.add_column(column)
    for target, configs in good.items():
        bench = Bench(target, length, device, masks)
        with counting_bar(console, str(target), len(masks)) as progress:
            measured = bench.ratios(configs, rounds=rounds, round_ms=round_ms, progress=progress)
        for each in measured:
            row = rows[target, each.config]
            row["ratio"] = each.mean
            row |= {f"ratio {kind}": ratio for kind, ratio in each.ratios.items()}
        for each in measured[:3]:
            error = bench.error(each.config)
            rows[target, each.config]["error"] = error
            if error <= 1:  # False for NaN
                ratios = (f"{each.ratios[kind]:.3f}" for kind in masks)
                numbers = (tuple(shipped(target, capability)), tuple(each.config))
                table.add_row(str(target), *map(str, numbers), f"{each.mean:.3f}", *ratios, f"{error:.2f}")
                if write and each.mean <= WORTH:
                    console.print(f"{write_entry(capability, target, each.config)}: {target} is now {each.config}")
                break
    console.print(table)


if __name__ == "__main__":
    app()

"""`python -m experiments.benchmarks.blocks`: the speed per live score in small blocks, compared with blocks of 128."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.interpreter import run_kernels_on
from experiments.training.atomic_files import write_csv

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(width=150)

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
    device: Annotated[str, typer.Option(help="cuda, or cpu: the interpreter, a test of the experiment.")] = "cuda",
    out: Annotated[Path, typer.Option(help="Where blocks.csv goes.")] = Path("runs/blocks"),
) -> None:
    """Time forward, dQ and dK/dV in the tiles of the mask and in those that the plan chooses.

    speed: live scores per second, relative to the same kind of mask in blocks of 128. cost: what the plan expects,
    relative to the chosen tiling. Ends with 1 if a tiling gives other results than the mask's own tiles.
    Two minutes on an H100, most of them compiling; --every takes about five.
    """
    run_kernels_on(device)
    import torch

    from experiments.benchmarks.blocks.measuring import BLOCKS, KERNELS, KINDS, Bench
    from experiments.benchmarks.tune.options import check_choices, configs_of

    check_choices("kernel", kernel, KERNELS)
    check_choices("mask", mask, KINDS)
    check_choices("block", block, BLOCKS)
    configs = configs_of(config)
    blocks = [128, *(b for b in block or BLOCKS if b != 128)]
    rows: list[Any] = []
    for d in dim or (64, 128):
        bench = Bench(d, length, torch.device(device))
        for kind in mask or KINDS:
            for size in blocks:
                chosen = [k for k in KERNELS if not kernel or k in kernel]
                small = size < 128
                rows += bench.measure(
                    kind, size, every=every and small, configs=configs if small else (), kernels=chosen
                )
            _print([row for row in rows if (row.dim, row.kind) == (d, kind)])
        _write(rows, out / "blocks.csv")
    console.print(f"All times: {out / 'blocks.csv'}", soft_wrap=True)
    wrong = [row for row in rows if not row.difference <= CLOSE]
    for row in wrong:
        console.print(f"WRONG: {row.kernel}, {row.kind} in blocks of {row.block}, {row.way}: {row.difference:.3g}")
    if wrong:
        raise typer.Exit(1)


def speeds(rows: Sequence[Any]) -> list[float]:
    """For each row, its live scores per second over those in blocks of 128 in the chosen tiling."""
    from experiments.benchmarks.blocks.measuring import CHOSEN

    whole = {(r.kind, r.dim, r.kernel): r.kept / r.ms for r in rows if r.block == 128 and r.way == CHOSEN}
    return [row.kept / row.ms / whole[row.kind, row.dim, row.kernel] for row in rows]


def _print(rows: Sequence[Any]) -> None:
    from experiments.benchmarks.blocks.measuring import CHOSEN, TARGETS

    table = Table(title=f"{rows[0].kind}, D={rows[0].dim}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("block", "kernel", "tiles", "held", "streamed", "gathered", "configuration"):
        table.add_column(column)
    for column in ("ms", "speed", "target", "cost"):
        table.add_column(column, justify="right")
    cost = {(r.block, r.kernel): r.predicted for r in rows if r.way == CHOSEN}
    for row, speed in zip(rows, speeds(rows), strict=True):
        table.add_row(
            str(row.block), row.kernel, row.way, *map(str, row.tiling), str(row.config), f"{row.ms:.3f}",
            f"{speed:.2f}", f"{TARGETS[row.block]:.2f}", f"{row.predicted / cost[row.block, row.kernel]:.2f}",
        )  # fmt: skip
    console.print(table)


def _write(rows: Sequence[Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        asdict(row) | {"tiling": "x".join(map(str, row.tiling)), "config": str(row.config), "speed": s}
        for row, s in zip(rows, speeds(rows), strict=True)
    ]
    write_csv(path, lines)


if __name__ == "__main__":
    app()

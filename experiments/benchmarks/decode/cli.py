"""The command: measures every case and writes the table and the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.benchmarks.decode.measure import CASES, Case, measure
from experiments.benchmarks.speed.named_calls import write_rows
from experiments.training.cli_errors import short_errors
from experiments.training.distributed import find_device

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
SMALL = (Case(2, 256, heads=4, kv_heads=2, dim=16, pages=2, window=32),)


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = ["| case | call | ms | GB/s |", "|---|---|---|---|"]
    for row in rows:
        numbers = f"{row['ms']:.4f} | {row['gb_per_s']:,.0f}" if "ms" in row else f"{row['error']} |"
        lines.append(f"| {row['case']} | {row['call']} | {numbers} |")
    return "\n".join(lines)


@app.command()
def decode(
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/decode"),
    device: Annotated[str, typer.Option(help="cuda, or cpu for a trial.")] = "cuda",
    small: Annotated[bool, typer.Option("--small", help="One small case, to try it.")] = False,
    commit: Annotated[str | None, typer.Option(help="The commit to note.", show_default="git's")] = None,
) -> None:
    """Measure one layer of a decoding step: contiguous and paged caches, windows, chosen pages, SDPA and FlashInfer."""
    with short_errors():
        place = find_device(device)
        out.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, Any]] = []
        print(table(rows), flush=True)
        for case in SMALL if small else CASES:
            made = measure(case, place, round_ms=0.0 if small else 30.0)
            rows += made
            print("\n".join(table(made).splitlines()[2:]), flush=True)
        write_rows(rows, table(rows), out, "decode", place, commit)

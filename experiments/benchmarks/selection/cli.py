"""The command: measures every case and writes the table and the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.benchmarks.selection.measure import CASES, Case, measure
from experiments.benchmarks.speed.named_calls import write_rows
from experiments.training.cli_errors import short_errors
from experiments.training.distributed import find_device

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
SMALL = (
    Case(256, 2, 32, 2, attends=False),
    Case(256, 4, 32, 2, kv_heads=2, dim=16),
    Case(256, 4, 32, 2, kv_heads=2, dim=16, by_query=True),
)


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = ["| case | call | ms | useful TFLOP/s | host, us |", "|---|---|---|---|---|"]
    for row in rows:
        numbers = f"{row['ms']:.3f} | {row['tflops']:,.0f} | {row['host_us']:,.0f}" if "ms" in row else row["error"]
        lines.append(f"| {row['case']} | {row['call']} | {numbers} |")
    return "\n".join(lines)


@app.command()
def selection(
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/selection-cost"),
    device: Annotated[str, typer.Option(help="cuda, or cpu for a trial.")] = "cuda",
    small: Annotated[bool, typer.Option("--small", help="Three small cases, to try it.")] = False,
    commit: Annotated[str | None, typer.Option(help="The commit to note.", show_default="git's")] = None,
) -> None:
    """Measure the choice of blocks, its plan and attention, eager and recorded, and peers with the same blocks."""
    with short_errors():
        place = find_device(device)
        out.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, Any]] = []
        print(table(rows), flush=True)
        shortly = {"round_ms": 0.0, "host_calls": 1} if small else {}
        for case in SMALL if small else CASES:
            found = measure(case, place, **shortly)
            print(*table(found).splitlines()[2:], sep="\n", flush=True)
            rows += found
        write_rows(rows, table(rows), out, "selection", place, commit)

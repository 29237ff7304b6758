"""`python -m experiments.benchmarks.exactness RECORDS`: how exact the cases of a test run were.

SPARSEFLASH_EXACTNESS=records pytest -m gpu tests/backends/test_exactness.py
python -m experiments.benchmarks.exactness records --about "one H100" --out experiments/results/exactness.md
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.benchmarks.exactness.summary import markdown, read
from experiments.training.cli_errors import short_errors

app = typer.Typer(add_completion=False)


@app.command()
def main(
    records: Annotated[list[Path], typer.Argument(exists=True, help="Files or folders of *.jsonl records.")],
    about: Annotated[
        list[str] | None, typer.Option(help="Device, versions, command; may be repeated, a line each.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the page here too.")] = None,
) -> None:
    """Condense the records that the exactness tests leave. Exits with 1 if a case exceeds what is allowed."""
    with short_errors():
        frame = read(records)
    page = markdown(frame, about or [])
    print(page, end="")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    if (frame["worst"] > 1).any():
        raise typer.Exit(1)


if __name__ == "__main__":
    app()

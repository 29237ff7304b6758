"""`python -m experiments.training thin LOG...`: thin out logs of runs, to store them with the results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.training import run_log
from experiments.training.cli_errors import short_errors
from experiments.training.options import command_group

app = command_group("What writers of results need.")


@app.callback()
def main() -> None:
    pass


@app.command()
def thin(
    logs: Annotated[list[Path], typer.Argument(exists=True, help="log.jsonl of runs, or folders to search for them.")],
    most: Annotated[
        int, typer.Option(help="Training lines to keep of each; the last 20 are among them.")
    ] = run_log.MOST_TRAINING,
) -> None:
    """Keep all records of validations and tests, the last 20 training records, and others evenly spaced."""
    with short_errors():
        for path in [log for each in logs for log in (sorted(each.rglob("log.jsonl")) if each.is_dir() else [each])]:
            records = run_log.read(path)
            kept = run_log.thinned(records, most)
            if len(kept) < len(records):
                run_log.write(path, kept)
                print(f"{path}: {len(kept):,} of {len(records):,} lines")


if __name__ == "__main__":
    app(prog_name="python -m experiments.training")

"""`python -m experiments.benchmarks.exactness`: how exact results are.

SPARSEFLASH_EXACTNESS=records pytest -m gpu tests/backends/test_exactness.py
python -m experiments.benchmarks.exactness records --out runs/exactness/drawn.jsonl

With `SPARSEFLASH_EXACTNESS=FOLDER` set, the exactness tests append a line of JSON for every case: the case, and the
errors of out, lse, dq, dk and dv in units of the allowed error. Only figures above 0.5 cover all draws of the inputs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.benchmarks.harness import Bench, Commit, Out
from experiments.measurements import current_run
from experiments.training.cli_errors import short_errors
from experiments.training.distributed import find_device
from experiments.training.reading import reading

RESULTS = ("out", "lse", "dq", "dk", "dv")
ALLOWED = "of what is allowed"
_KEPT = ("backend", "device", "dtype", "dim", "v_dim", "tokens", "problem", *RESULTS)
Record = dict[str, Any]


def read(paths: list[Path]) -> list[Record]:
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    rows = [row for file in files for row in _rows(file)]
    if not rows:
        raise ValueError(f"found no record in {', '.join(map(str, paths))}; run the tests with SPARSEFLASH_EXACTNESS.")
    return [row | {"worst": max(row[name] for name in RESULTS if row[name] is not None)} for row in rows]


def _rows(path: Path) -> Iterator[Record]:
    with reading(path, "records of an exactness run"):
        lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            missing = [name for name in _KEPT if name not in row]
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: no JSON object ({error}).") from error
        if missing:
            raise ValueError(f"{path}, line {number}: no {', '.join(missing)}.")
        yield row


def condense(bench: Bench, records: Sequence[Record]) -> None:
    for backend, dtype in sorted({(each["backend"], each["dtype"]) for each in records}):
        some = [each for each in records if (each["backend"], each["dtype"]) == (backend, dtype)]
        for name in (*RESULTS, "worst"):
            found = [each[name] for each in some if each[name] is not None]
            if found:
                bench.add(f"{dtype}/{name}/{backend}", max(found), ALLOWED)
        bench.add(f"{dtype}/cases/{backend}", float(len(some)), "cases")
        for dim, v_dim in sorted({(each["dim"], each["v_dim"]) for each in some}):
            worst = [each["worst"] for each in some if (each["dim"], each["v_dim"]) == (dim, v_dim)]
            bench.add(f"{dtype}/{dim}-{v_dim}/{backend}", max(worst), ALLOWED, cases=len(worst))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def drawn(
    records: Annotated[list[Path], typer.Argument(exists=True, help="Files or folders of *.jsonl records.")],
    about: Annotated[list[str] | None, typer.Option(help="The commands that made the records.")] = None,
    commit: Commit = None,
    out: Out = Path("runs/exactness/drawn.jsonl"),
) -> None:
    """Condense the records that the exactness tests leave. Exits with 1 if a case exceeds the allowed error."""
    with short_errors():
        found = read(records)
    device = find_device("auto")
    run = current_run(device, "python -m experiments.benchmarks.exactness", commit=commit, helped=about or ())
    bench = Bench("exactness", run, out, device)
    condense(bench, found)
    bench.finish()
    worst = max(found, key=lambda each: float(each["worst"]))
    wrong = sum(each["worst"] > 1 for each in found)
    verdict = f"{wrong:,} beyond what is allowed" if wrong else "all within what is allowed"
    print(
        f"{len(found):,} drawn cases, {verdict}; the worst ({worst['dtype']}, {worst['worst']:.3f}): {worst['problem']}"
    )
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()

"""Reads the records of an exactness run and condenses them.

With `SPARSEFLASH_EXACTNESS=FOLDER` set, every case that `tests/compared/exactness.py` checks appends a line of JSON to
a file in FOLDER: the drawn case, and the errors of out, lse, dq, dk and dv in units of the allowed error (see
`tests/compared/closeness.py`): twice the error of a plain implementation in the same dtype on the same inputs, plus one
unit in the last place of the largest value. Draws of the inputs, at most 16, stop once the error of a case is at most
half the allowed one, so only figures above 0.5 cover all draws.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.harness import Bench
from experiments.training.reading import reading

RESULTS = ("out", "lse", "dq", "dk", "dv")
ALLOWED = "of what is allowed"  # the unit of errors
_KEPT = ("backend", "device", "dtype", "dim", "v_dim", "tokens", "problem", *RESULTS)
Record = dict[str, Any]


def read(paths: list[Path]) -> list[Record]:
    """The records of these files, or of the `*.jsonl` in these folders, with the worst error of each.

    Raises ValueError for a line that is not a record, and if there are no records.
    """
    rows = [row for path in paths for row in _rows(path)]
    if not rows:
        raise ValueError(f"found no record in {', '.join(map(str, paths))}; run the tests with SPARSEFLASH_EXACTNESS.")
    return [row | {"worst": max(row[name] for name in RESULTS if row[name] is not None)} for row in rows]


def _rows(path: Path) -> Iterator[Record]:
    if path.is_dir():
        for file in sorted(path.glob("*.jsonl")):
            yield from _rows(file)
        return
    with reading(path, "records of an exactness run"):
        lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # nested too deeply
            raise ValueError(f"{path}, line {number}: no JSON ({error}).") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: no object.")
        if missing := [name for name in _KEPT if name not in row]:
            raise ValueError(f"{path}, line {number}: no {', '.join(missing)}.")
        yield row


def condense(bench: Bench, records: Sequence[Record]) -> None:
    """For each backend and dtype the largest error of each result, the number of cases, and both for each head dim."""
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

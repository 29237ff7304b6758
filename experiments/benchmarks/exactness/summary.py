"""Reads the records of an exactness run and condenses them.

With `SPARSEFLASH_EXACTNESS=FOLDER` set, every case that `tests/exactness.py` checks appends a line of JSON to a
file in FOLDER: what was drawn, and for out, lse, dq, dk and dv the error in units of what is allowed (see
`tests/closeness.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from experiments.training.reading import reading

RESULTS = ("out", "lse", "dq", "dk", "dv")
_KEPT = ("backend", "device", "dtype", "dim", "v_dim", "tokens", "problem", *RESULTS)


def read(paths: list[Path]) -> pd.DataFrame:
    """The records of these files, or of the `*.jsonl` in these folders, one a row.

    Raises ValueError for a line that is not a record, and if there are no records.
    """
    rows = [row for path in paths for row in _rows(path)]
    if not rows:
        raise ValueError(f"found no record in {', '.join(map(str, paths))}; run the tests with SPARSEFLASH_EXACTNESS.")
    frame = pd.DataFrame(rows, columns=list(_KEPT))
    frame["worst"] = frame[list(RESULTS)].max(axis=1)
    return frame


def _rows(path: Path) -> Iterator[dict[str, object]]:
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


def by_dtype(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each backend, device and dtype: cases, head dims, and the largest error of each result, in
    yardsticks.
    """
    groups = frame.groupby(["backend", "device", "dtype"], sort=True)
    table = groups.agg(cases=("worst", "size"), smallest=("dim", "min"), largest=("dim", "max"))
    table["D"] = table.pop("smallest").astype(str) + " to " + table.pop("largest").astype(str)
    return table.join(groups[[*RESULTS, "worst"]].max()).reset_index()


def by_dim(frame: pd.DataFrame) -> pd.DataFrame:
    """The number of cases and the largest error for every dtype (columns) and pair of head dims (rows)."""
    dims = frame["dim"].astype(str) + " / " + frame["v_dim"].astype(str)
    order = frame.assign(dims=dims).sort_values(["dim", "v_dim"])["dims"].unique()
    groups = frame.assign(dims=dims).groupby(["dims", "dtype"])["worst"]
    cells = groups.agg(lambda worst: f"{worst.max():.2f} ({len(worst)})").unstack().reindex(order)
    return cells.fillna("").reset_index().rename(columns={"dims": "D / Dv"})


def markdown(frame: pd.DataFrame, about: list[str]) -> str:
    """The page for `experiments/results`: `about` describes where and how the run was made, in lines."""
    worst = frame.loc[frame["worst"].idxmax()]
    failed = int((frame["worst"] > 1).sum())
    lines = [
        "# Exactness",
        "",
        f"{len(frame):,} drawn cases, each forward, lse and three gradients against dense attention in fp64; "
        + (f"**{failed:,} beyond what is allowed**." if failed else "all within what is allowed."),
        "",
        "Errors are in yardsticks: 1 is what is allowed, twice the error of a plain implementation in the same dtype",
        "on the same inputs, plus one unit in the last place of the largest value (`tests/closeness.py`). Of up to 16",
        "draws of the inputs no more are made than bring a case to half, so only figures above 0.5 are of all draws.",
        "",
        *([*(f"- {line}" for line in about), ""] if about else []),
        _table(by_dtype(frame)),
        "",
        "The largest error and, in brackets, the cases for each head dim:",
        "",
        _table(by_dim(frame)),
        "",
        f"The worst case ({worst['dtype']}, {worst['worst']:.3f}):",
        "",
        "```python",
        str(worst["problem"]),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _table(frame: pd.DataFrame) -> str:
    def cell(value: object) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    head = "| " + " | ".join(frame.columns) + " |"
    rows = ["| " + " | ".join(map(cell, row)) + " |" for row in frame.itertuples(index=False)]
    return "\n".join([head, "|" + "---|" * len(frame.columns), *rows])

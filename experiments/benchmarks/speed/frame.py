"""The rows of one or of several runs as one table, in which nothing is compared across runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from experiments.benchmarks.speed.rows import NOT_RUN, OK, OURS
from experiments.training.environment import FACTS
from experiments.training.reading import reading

# The columns that identify a measurement apart from the implementation. Rows of one run that agree in them may be
# compared.
SETUP = ["device", "batch", "heads", "kv_heads", "length", "head_dim", "dtype", "block"]
CASE = ["group", "case", "mask", *SETUP]
TEXT = ["group", "case", "mask", "dtype", "peer", "direction", "status", "checked", "reason", *FACTS]


def read(paths: Iterable[Path]) -> pd.DataFrame:
    """The rows of all files, in the order of the files.

    Raises ValueError for a file that is not from this benchmark, or from a version that did not record its run.
    """
    frames = []
    for path in paths:
        with reading(path, "speed.csv of a run"):
            found = pd.read_csv(path, dtype=dict.fromkeys(TEXT, str), keep_default_na=False, na_values={
                name: [""] for name in ("density", "ms", "spread", "tflops", "ratio", "memory_mib", "first_call_s",
                                        "error", "difference")
            })  # fmt: skip
        missing = [name for name in (*CASE, *TEXT, "ms", "memory_mib") if name not in found]
        if missing:
            raise ValueError(f"{path.name} must have the columns of speed.csv; it lacks {', '.join(missing)}.")
        frames.append(found)
    if not frames:
        raise ValueError("a report must have at least one CSV file; got none.")
    return pd.concat(frames, ignore_index=True).drop_duplicates(ignore_index=True)


def newest(rows: pd.DataFrame) -> pd.DataFrame:
    """For each case, the rows of the newest run that reached it, so that a case is never mixed from several runs."""
    rows = rows.reset_index(drop=True)
    reached = rows[(rows["peer"] == OURS) & (rows["status"] != NOT_RUN)]
    last = reached.groupby(CASE, sort=False)["run"].max().rename("last").reset_index()
    wanted = rows[CASE].merge(last, on=CASE, how="left")["last"]
    # A case that no run reached is shown as in the newest run.
    wanted = wanted.fillna(rows.groupby(CASE, sort=False)["run"].transform("max"))
    return rows[rows["run"] == wanted].reset_index(drop=True)


def timed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a time."""
    return rows[(rows["status"] == OK) & rows["ms"].notna()]

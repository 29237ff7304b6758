"""The results as rows, and as a CSV file in which every line has its run, device and versions."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from experiments.benchmarks.speed.cases import Case

OURS = "ours"
OK, WRONG, FAILED, SKIPPED, DIFFERS, NOT_RUN = "ok", "WRONG", "FAILED", "skipped", "DIFFERS", "not run"


@dataclass
class Row:
    """One case, one implementation, one pass. Numbers that do not exist are None.

    `ratio`: the peer's time over ours; above 1 ours is faster. `error`: that of ours, in units of the yardstick of
    check.py, at most 1. `difference`: the relative difference of a peer from ours.
    """

    case: Case
    peer: str
    direction: str
    status: str
    density: float | None = None
    ms: float | None = None
    spread: float | None = None  # range of the rounds' medians over the median
    tflops: float | None = None  # useful TFLOP/s
    ratio: float | None = None
    memory_mib: float | None = None  # peak of a forward and a backward, including inputs and mask
    first_call_s: float | None = None  # seconds, including compilation
    error: float | None = None
    difference: float | None = None
    checked: str = ""  # the part of ours that was compared with fp64
    reason: str = ""

    def columns(self) -> dict[str, object]:
        """The columns of the CSV file, without those that describe the run."""
        case = self.case
        return {
            "group": case.group,
            "case": case.name,
            "mask": case.kind,
            "batch": case.batch,
            "heads": case.heads,
            "kv_heads": case.heads_of_keys,
            "length": case.length,
            "head_dim": case.head_dim,
            "dtype": case.arithmetic,
            "block": case.block,
            **{field.name: getattr(self, field.name) for field in fields(self) if field.name != "case"},
        }


def write_csv(rows: Sequence[Row], facts: Mapping[str, str], path: Path) -> None:
    """Writes all rows, one line each, with six digits of each float."""
    with path.open("w", newline="") as file:
        lines = [{**row.columns(), **facts} for row in rows]
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        for line in lines:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in line.items()})

"""The table of calls, as a page and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from experiments.benchmarks.calls.ways import FIRST_CALLS, IMPLEMENTATIONS, NOTES, THROUGH_TRITON, WAYS, Shape
from experiments.benchmarks.timing import Timing


class Row(NamedTuple):
    """The host time of one way of calling one implementation, or the reason why there is none."""

    way: str  # one of WAYS, in microseconds, or of FIRST_CALLS, in seconds
    implementation: str
    value: float | None
    fastest: float | None = None  # of the turns, of which the value is the median
    slowest: float | None = None
    failure: str = ""

    @classmethod
    def of(cls, way: str, implementation: str, timing: Timing) -> Row:
        """The row of a measurement."""
        if timing.failure is None:
            turns = [1e3 * median(turn) for turn in timing.rounds]
            return cls(way, implementation, timing.ms * 1e3, min(turns), max(turns))
        reason = f"{type(timing.failure).__name__}: {timing.failure}".splitlines()[0]
        return cls(way, implementation, None, failure=reason[:200])


def markdown(rows: Sequence[Row], shape: Shape, facts: Mapping[str, str]) -> str:
    """The page."""
    lines = ["# Calls: host time", "", *(f"- {name}: {value}" for name, value in facts.items())]
    lines.append("- shape: " + ", ".join(f"{name} {value}" for name, value in shape._asdict().items()) + "; bf16")
    lines += ["", "Microseconds a call, median of the turns (fastest to slowest):", "", *_table(WAYS, rows)]
    if any(row.way in FIRST_CALLS for row in rows):
        title = "Seconds of the first calls of a new process, with empty caches of compiled kernels:"
        lines += ["", title, "", *_table(FIRST_CALLS, rows)]
    lines += ["", *(f"- {way}: {note}" for way, note in NOTES.items())]
    failures = [f"- failed: {row.implementation}, {row.way}: {row.failure}" for row in rows if row.failure]
    return "\n".join(lines + failures) + "\n"


def _table(ways: Sequence[str], rows: Sequence[Row]) -> list[str]:
    found = {(row.way, row.implementation): row for row in rows}
    extra = [THROUGH_TRITON] if any((way, THROUGH_TRITON) in found for way in ways) else []
    names = [*IMPLEMENTATIONS, *extra]
    lines = ["| | " + " | ".join(names) + " |", "|---" + "|---:" * len(names) + "|"]
    for way in ways:
        cells = (_cell(found.get((way, name))) for name in names)
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return lines


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.value is None:
        return "failed"
    if row.fastest is None:
        return f"{row.value:.2f}"
    return f"{row.value:.0f} ({row.fastest:.0f} to {row.slowest:.0f})"


def write(folder: Path, rows: Sequence[Row], shape: Shape, facts: Mapping[str, str]) -> None:
    """The page and the rows, as `calls.md` and `calls.csv`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "calls.md").write_text(markdown(rows, shape, facts))
    with (folder / "calls.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["call", "implementation", "value", "unit", "fastest", "slowest", "failure"])
        for row in rows:
            numbers = ("" if x is None else f"{x:.4g}" for x in (row.value, row.fastest, row.slowest))
            value, fastest, slowest = numbers
            unit = "us" if row.way in WAYS else "s"
            writer.writerow([row.way, row.implementation, value, unit, fastest, slowest, row.failure])

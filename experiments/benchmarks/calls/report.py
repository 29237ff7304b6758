"""The table of calls, as a page and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.benchmarks.calls.ways import IMPLEMENTATIONS, NOTES, WAYS, Shape


class Row(NamedTuple):
    """Host time of one way of calling one implementation."""

    way: str
    implementation: str
    us: float  # median of the turns
    spread: float  # range of the turns over it
    failure: Exception | None = None


def markdown(
    rows: Sequence[Row], firsts: Mapping[str, Mapping[str, float]], first_calls: Sequence[str], shape: Shape,
    facts: Mapping[str, str],
) -> str:  # fmt: skip
    """The page."""
    found = {(row.way, row.implementation): row for row in rows}
    head = "| | " + " | ".join(IMPLEMENTATIONS) + " |"
    rule = "|---" + "|---:" * len(IMPLEMENTATIONS) + "|"
    lines = ["# Calls: host time", "", *(f"- {name}: {value}" for name, value in facts.items())]
    lines += ["- shape: " + ", ".join(f"{name} {value}" for name, value in shape._asdict().items()) + "; bf16", ""]
    lines += ["Microseconds a call, median of the turns (± half their range):", "", head, rule]
    for way in WAYS:
        cells = (_cell(found.get((way, name))) for name in IMPLEMENTATIONS)
        lines.append(f"| {way} | {' | '.join(cells)} |")
    if firsts:
        lines += ["", "Seconds of the first calls of a new process, with empty caches of kernels:", "", head, rule]
        for what in first_calls:
            cells = (f"{firsts[name][what]:.2f}" for name in IMPLEMENTATIONS)
            lines.append(f"| {what} | {' | '.join(cells)} |")
    lines += ["", *(f"- {way}: {note}" for way, note in NOTES.items())]
    failures = [f"- {row.implementation}, {row.way}: {row.failure}" for row in rows if row.failure is not None]
    return "\n".join(lines + failures) + "\n"


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    return "failed" if row.failure is not None else f"{row.us:.0f} ± {row.us * row.spread / 2:.0f}"


def write(
    folder: Path, rows: Sequence[Row], firsts: Mapping[str, Mapping[str, float]], first_calls: Sequence[str],
    shape: Shape, facts: Mapping[str, str],
) -> None:  # fmt: skip
    """The page and the rows, as `calls.md` and `calls.csv`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "calls.md").write_text(markdown(rows, firsts, first_calls, shape, facts))
    with (folder / "calls.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["call", "implementation", "value", "unit", "spread"])
        for row in rows:
            value = "" if row.failure is not None else f"{row.us:.1f}"
            writer.writerow([row.way, row.implementation, value, "us", f"{row.spread:.3f}"])
        for name, seconds in firsts.items():
            writer.writerows([what, name, f"{seconds[what]:.2f}", "s", ""] for what in first_calls)

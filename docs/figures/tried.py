"""Tables of ideas that were tried, from `experiments/results/tried/TOPIC.csv`."""

from __future__ import annotations

import csv
from pathlib import Path

from docs.figures.store import RESULTS, FigureError

COLUMNS = ("section", "idea", "predicted", "measured", "unit", "device", "commit", "why")


def rows_of(topic: str, results: Path = RESULTS) -> list[dict[str, str]]:
    """The lines of a topic's file; every idea needs a measurement or a reason."""
    with (results / "tried" / f"{topic}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if tuple(row) != COLUMNS or not row["idea"] or not (row["measured"] or row["why"]):
            raise FigureError(f"{topic}.csv must have {', '.join(COLUMNS)}, an idea and a measurement; got {row}")
    return rows


def table(name: str, results: Path = RESULTS) -> str:
    """The table of TOPIC/SECTION, or of a TOPIC without sections, and below it the unit and the device."""
    topic, _, section = name.partition("/")
    rows = [row for row in rows_of(topic, results) if row["section"] == section]
    if not rows:
        raise FigureError(f"tried/{name} must be a section of tried/{topic}.csv; it is not")
    has_prediction = any(row["predicted"] for row in rows)
    lines = ["| idea | predicted | measured | result |" if has_prediction else "| idea | measured | result |"]
    lines.append("|---" * (3 + has_prediction) + "|")
    for row in rows:
        cells = [f"{row['idea']} ({row['commit'].replace(' ', ', ')})" if row["commit"] else row["idea"]]
        cells += [row["predicted"] or "-"] if has_prediction else []
        cells += [row["measured"] or "-", row["why"]]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    units, devices = (" or ".join(dict.fromkeys(row[of] for row in rows if row[of])) for of in ("unit", "device"))
    caption = [f"Numbers without a unit: {units}."] if units else []
    caption += [f"Device: {devices}."] if devices else []
    return "\n".join([*lines, *(["", " ".join(caption)] if caption else [])])

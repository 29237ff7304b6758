from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.benchmarks.patterns.flex import Peer
from experiments.benchmarks.patterns.measure import Row
from experiments.training.reading import reading

BEGIN, END = "<!-- patterns table: begin -->", "<!-- patterns table: end -->"
COLUMNS = (
    "pattern", "live scores", "density", "live tiles", "layers", "built", "in", "mask", "Flex, eager", "Flex, compiled",
)  # fmt: skip
LEFT = 2  # of text


def markdown(rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * LEFT + "---:|" * (len(COLUMNS) - LEFT)]
    for row in rows:
        cells = (
            row.name, row.rule.replace("|", "\\|"), f"{100 * row.density:.3g} %", f"{row.tiles:,.0f}", str(row.layers),
            length(row.tokens), duration(row.seconds), size(row.megabytes), peer(row.eager), peer(row.compiled),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def peer(found: Peer | None) -> str:
    if found is None:
        return "-"
    return f"{length(found.tokens)}: {duration(found.seconds)}, {size(found.megabytes)}"


def length(tokens: int) -> str:
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return f"{tokens:,}"


def duration(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def size(megabytes: float) -> str:
    return f"{megabytes / 1000:.3g} GB" if megabytes >= 999.5 else f"{megabytes:.3g} MB"


def put(text: str, path: Path) -> None:
    old = path.read_text(encoding="utf-8") if path.exists() else "# The pattern library\n"
    between = f"{BEGIN}\n{text}\n{END}"
    if old.count(BEGIN) > 1 or old.count(BEGIN) != old.count(END):
        raise ValueError(f"{path} must have the marks {BEGIN} and {END} once each, or not at all.")
    if BEGIN in old:
        before, rest = old.split(BEGIN)
        new = before + between + rest.split(END)[1]
    else:
        new = old.rstrip("\n") + f"\n\n{between}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(new, encoding="utf-8")


def load(path: Path) -> dict[str, Row]:
    if not path.exists():
        return {}
    with reading(path, "a JSON file of rows that this command has written"):
        return {values["name"]: Row.of_json(values) for values in json.loads(path.read_text(encoding="utf-8"))}


def save(rows: Iterable[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n", encoding="utf-8")

"""The tables and sentences of the pages, as data: which figure stands in which cell.

A cell is a request as in a page (`store.figure`), in which `{row}` and `{column}` stand for what the labels stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from docs.figures import versions
from docs.figures.store import FigureError, Stored, figure


@dataclass(frozen=True)
class Table:
    """A grid of figures. Labels of rows and columns, and what stands for each in the names of the cells."""

    rows: dict[str, str]
    columns: dict[str, str]
    cell: str
    corner: str = ""
    absent: str = ""  # the text for what was not measured; empty: every cell must be there
    note: str = ""  # follows the run below the table
    last: str = ""  # a line of Markdown below the rows


@dataclass(frozen=True)
class Rendered:
    """A table as Markdown, the runs that it is from, and what is said below it."""

    text: str
    files: dict[str, Stored]
    note: str = ""


def rendered(table: Table, results: Path) -> Rendered:
    """The table with its figures."""
    first = f"| {' | '.join([table.corner, *table.columns])} |".replace("|  |", "| |")
    lines = [first, "|---" * (first.count("|") - 1) + "|"]
    files: dict[str, Stored] = {}
    spread = 0.0
    for label, row in table.rows.items():
        cells = []
        for column in table.columns.values():
            request = table.cell.replace("{row}", row).replace("{column}", column)
            try:
                found = figure(request, results)
            except FigureError:
                if not table.absent:
                    raise
                cells.append(table.absent)
                continue
            files[found.file.key] = found.file
            spread = max(spread, found.spread)
            cells.append(found.text)
        if all(cell == table.absent for cell in cells):
            raise FigureError(f"the row {label} must have a measured figure; the store has none of {table.cell}")
        lines.append(f"| {' | '.join([label, *cells])} |")
    noise = f"largest spread of a figure {100 * spread:.0f} %" if spread else ""
    lines += [table.last] if table.last else []
    return Rendered("\n".join(lines), files, "; ".join(filter(None, [table.note, noise])))


_SIX = {"dense": "dense", "causal": "causal", "butterfly": "butterfly", "local": "local",
        "random, 12.9 %": "random12", "bigbird": "bigbird"}  # fmt: skip
_PASSES = {"D=128 forward": "128/forward", "D=128 backward": "128/backward",
           "D=64 forward": "64/forward", "D=64 backward": "64/backward"}  # fmt: skip


def _beside(peer: str, columns: dict[str, str] = _SIX) -> Table:
    """A peer's time over ours, six masks by passes."""
    names = "speed/{column}/{row}/"
    return Table(
        _PASSES, columns, f"{names}{peer} / {names}sparseflash @ h200", note="the peer's time over ours", absent="none"
    )


TABLES = {
    "speed-beside-fa4": _beside("fa4"),
    "triton-versions": Table(
        versions.rows(), {"forward": "forward", "backward": "backward"}, versions.CELL, corner=versions.CORNER,
        note="speed relative to the first row, of 12 cases of `speed --quick`", last=versions.OTHERS,
    ),
}  # fmt: skip
TEXTS: dict[str, Callable[[], str]] = {"triton-versions": versions.sentence}

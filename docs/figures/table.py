"""A table of figures: which request stands in which cell."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from docs.figures.store import SEEDS, FigureError, Stored, figure


@dataclass(frozen=True)
class Table:
    """A grid of figures. The labels of rows and columns, and the text that replaces each in the cells' requests.

    A row's text may contain `{column}`, and end with ` @ FILE`, the run of its cells.
    """

    rows: dict[str, str]
    columns: dict[str, str]
    cell: str
    corner: str = ""
    absent: str = ""  # the text of a missing cell; empty: every cell must be there
    note: str = ""  # a sentence that follows the run below the table
    last: str = ""  # a line of Markdown below the rows
    units: bool = True  # whether cells have units
    bold: bool = True  # whether a ratio above 1 is good, and bold


_NOISES = {
    frozenset(): "", frozenset({True}): "± is the noise.", frozenset({False}): "The noise is at most 0.01.",
    frozenset({True, False}): "± is the noise; where there is no ±, it is at most 0.01.",
}  # fmt: skip


@dataclass(frozen=True)
class Rendered:
    """A table as Markdown, its runs, and the text below it."""

    text: str
    files: dict[str, Stored]
    note: str = ""


def rendered(table: Table, results: Path) -> Rendered:
    """The table with its figures."""
    first = f"| {' | '.join([table.corner, *table.columns])} |".replace("|  |", "| |")
    lines = [first, "|---" * (first.replace(r"\|", "").count("|") - 1) + "|"]
    files: dict[str, Stored] = {}
    spread, of_what = 0.0, "figure"
    noises: set[bool] = set()  # of cells with one ratio, whether their noise is shown
    for label, asked in table.rows.items():
        row, at, file = asked.partition(" @ ")
        cells = []
        for column in table.columns.values():
            of_column = row.replace("{column}", column)
            request = (table.cell or column).replace("{column}", column).replace("{row}", of_column) + at + file
            try:
                found = figure(request, results)
            except FigureError:
                if not table.absent:
                    raise
                cells.append(table.absent)
                continue
            files[found.file.key] = found.file
            is_one_ratio = " / " in request and " to " not in found.text
            noises |= {bool(found.noise)} if is_one_ratio else set()
            if SEEDS not in found.text and not is_one_ratio:  # else the noise or deviation stands in the cell
                spread = max(spread, found.spread)
                of_what = "single case" if " to " in found.text else of_what
            text = found.text if table.units else found.text.removesuffix(found.unit)
            cells.append((text if table.bold else text.strip("*")) + found.noise)
        if all(cell == table.absent for cell in cells):
            raise FigureError(f"the row {label} must have a measured figure; the store has none of {table.cell}")
        lines.append(f"| {' | '.join([label, *cells])} |")
    percent = f"{100 * spread:.0f} %"
    notes = [table.note, _NOISES[frozenset(noises)] if True in noises or percent == "0 %" else ""]
    notes += [] if percent == "0 %" else [f"The noise of a {of_what} is at most {percent}."]
    lines += [table.last] if table.last else []
    return Rendered("\n".join(lines), files, " ".join(filter(None, notes)))

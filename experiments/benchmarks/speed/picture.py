"""The picture of the workloads: a row for each, a cell for each peer and pass, its ratio by colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.benchmarks.speed.rows import OURS
from experiments.measurements import Measurement

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PASSES = ("forward", "backward")
MOST = 2.0  # the ratio whose colour is the strongest, and its inverse


def ratios(measurements: Sequence[Measurement]) -> dict[str, dict[str, float]]:
    """By workload, then by pass and peer: how many times as fast as the peer ours is."""
    timed = {each.name: each.value for each in measurements if each.value is not None and each.unit == "ms"}
    found: dict[str, dict[str, float]] = {}
    for name, value in timed.items():
        row, _, way = name.rpartition("/")
        ours = timed.get(f"{row}/{OURS}")
        if ours is not None and not way.startswith(OURS):
            _, workload, which = row.split("/")
            found.setdefault(workload, {})[f"{which}, {way}"] = value / ours
    return found


def draw(measurements: Sequence[Measurement], title: str) -> Figure:
    """Blue: ours is faster; red: the peer is."""
    from matplotlib.figure import Figure  # not pyplot, which needs a display and keeps state

    found = ratios(measurements)
    known = {name for cells in found.values() for name in cells}
    columns = sorted(known, key=lambda name: (PASSES.index(name.split(", ")[0]), name))
    figure = Figure(figsize=(2.4 + 0.9 * len(columns), 1.6 + 0.28 * len(found)), layout="constrained")
    axis = figure.subplots()
    logs = [[math.log2(cells[name]) if name in cells else math.nan for name in columns] for cells in found.values()]
    if logs:
        axis.imshow(logs, cmap="RdBu", vmin=-math.log2(MOST), vmax=math.log2(MOST), aspect="auto")
    for row, cells in enumerate(found.values()):
        for column, name in enumerate(columns):
            if name in cells:
                colour = "white" if abs(logs[row][column]) > 0.7 * math.log2(MOST) else "black"
                axis.text(column, row, f"{cells[name]:.2f}", ha="center", va="center", fontsize=7, color=colour)
    axis.set_xticks(range(len(columns)), [name.replace(", ", "\n") for name in columns], fontsize=7)
    axis.set_yticks(range(len(found)), list(found), fontsize=7)
    axis.set_title(f"The peer's time over ours (blue: ours is faster)\n{title}", fontsize=8)
    return figure


def save(measurements: Sequence[Measurement], title: str, path: Path) -> None:
    """Writes the picture as PNG."""
    draw(measurements, title).savefig(path, dpi=130, metadata={"Software": None})

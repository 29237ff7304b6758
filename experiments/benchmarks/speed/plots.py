"""The pictures of a report: time over density, TFLOP/s over length, memory over length."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from experiments.benchmarks.speed import derived
from experiments.benchmarks.speed.cases import BACKWARD, FORWARD
from experiments.benchmarks.speed.frame import CASE, timed
from experiments.benchmarks.speed.rows import OURS
from experiments.benchmarks.speed.tables import tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that colour-blind readers can tell apart (Okabe and Ito, two of Tol); a peer has the same in every picture.
COLOURS = {
    OURS: "#000000",
    "ours-hopper": "#882255",
    "ours-portable": "#44AA99",
    "flex": "#0072B2",
    "flex-autotune": "#56B4E9",
    "fa4": "#D55E00",
    "fa4-deterministic": "#F0E442",
    "sdpa-fa2": "#009E73",
    "sdpa-cudnn": "#CC79A7",
    "sdpa": "#E69F00",
    "reference": "#999999",
}
MARKERS = {
    OURS: "o", "ours-hopper": "h", "ours-portable": "p", "flex": "s", "flex-autotune": "D", "fa4": "^",
    "fa4-deterministic": "<", "sdpa-fa2": "v", "sdpa-cudnn": "P", "sdpa": "X",
}  # fmt: skip
PANEL = 4.6, 3.6  # inches
MOST_IN_A_LINE = 5  # of a legend, below two panels
NAME_WIDTH = 0.035  # of a vertical name, as a share of the panel's width


def _figure(rows: int, columns: int, title: str) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure  # not pyplot, which needs a display and keeps state

    figure = Figure(figsize=(PANEL[0] * max(columns, 2), PANEL[1] * rows + 0.9), layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _peers(rows: pd.DataFrame) -> list[str]:
    known = {peer: place for place, peer in enumerate(COLOURS)}
    return sorted(set(rows["peer"]), key=lambda peer: (known.get(peer, len(known)), peer))


def _style(peer: str) -> dict[str, Any]:
    return {"color": COLOURS.get(peer, "#F0E442"), "marker": MARKERS.get(peer, "."), "markersize": 5, "label": peer}


def _lengths(axis: Any, lengths: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [tokens(length) for length in lengths], fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel("tokens")
    axis.grid(alpha=0.3)


def _legend(figure: Figure, axis: Any) -> None:
    """One legend below all panels, where it hides no point, with ours first."""
    handles, labels = axis.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda place: (labels[place] not in COLOURS, -place))
    figure.legend(
        [handles[place] for place in order], [labels[place] for place in order], loc="outside lower center",
        ncols=min(len(order), MOST_IN_A_LINE), fontsize=8, frameon=False,
    )  # fmt: skip


def _fullest(axes: Any) -> Any:
    """The panel with the most implementations."""
    return max(axes.flat, key=lambda axis: len(axis.get_legend_handles_labels()[1]))


def density(rows: pd.DataFrame, title: str) -> Figure | None:
    """Time over density, forward and backward, one row of panels a head dim. The line is our dense time multiplied by
    the density: for a mask on it, a live score costs as much as in dense attention.
    """
    found = timed(rows)
    found = found[(found["group"] == "masks") & found["direction"].isin((FORWARD, BACKWARD))]
    dims = sorted(set(found["head_dim"]))
    if not dims:
        return None
    figure, axes = _figure(len(dims), 2, f"Time over density\n{title}")
    for line, dim in zip(axes, dims):
        for axis, way in zip(line, (FORWARD, BACKWARD)):
            part = found[(found["head_dim"] == dim) & (found["direction"] == way)]
            _density_panel(axis, part)
            setup = part.iloc[0] if len(part) else None
            shape = "" if setup is None else f", {setup['length']} tokens, {setup['heads']} heads, {setup['dtype']}"
            axis.set_title(f"{way}, D={dim}{shape}", fontsize=9)
    _legend(figure, _fullest(axes))
    return figure


def _density_panel(axis: Any, rows: pd.DataFrame) -> None:
    for peer in reversed(_peers(rows)):  # ours on top
        mine = rows[rows["peer"] == peer]
        axis.plot(100 * mine["density"], mine["ms"], linestyle="none", **_style(peer))
    ours = rows[rows["peer"] == OURS].sort_values("density")
    dense = ours.loc[ours["mask"] == "dense", "ms"]
    axis.set_xscale("log")
    axis.set_yscale("log")
    if len(dense):
        least = ours["density"].min()
        axis.plot(
            [100 * least, 100], [least * dense.iloc[-1], dense.iloc[-1]], "--", color="#000000", linewidth=0.8,
            label="ideal: density x our dense time",
        )  # fmt: skip
    _name_masks(axis, ours)
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_formatter(lambda value, place: f"{value:g}")
    axis.set_xlabel("live scores, %")
    axis.set_ylabel("milliseconds")
    axis.grid(alpha=0.3)


def _name_masks(axis: Any, rows: pd.DataFrame) -> None:
    """Writes the names along the bottom, moved apart if densities are close, each joined to its point by a line."""
    low, high = axis.get_ylim()
    left, right = axis.get_xlim()
    span = math.log(right / left)
    axis.set_ylim(low / (high / low) ** 0.4, high)
    at = 0.0
    places = []
    for value in 100 * rows["density"]:
        at = max(math.log(value / left) / span, at + NAME_WIDTH)
        places.append(at)
    # Move names back that are now past the right end.
    limit = 0.985
    for number in reversed(range(len(places))):
        places[number] = min(places[number], limit)
        limit = places[number] - NAME_WIDTH
    for place, (_, row) in zip(places, rows.iterrows()):
        axis.annotate(
            row["mask"], (100 * row["density"], row["ms"]), xytext=(place, 0.02), textcoords="axes fraction",
            fontsize=7, rotation=90, ha="center", va="bottom",
            arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.5},
        )  # fmt: skip
    axis.set_xlim(left, right)


def lengths(rows: pd.DataFrame, title: str) -> Figure | None:
    """Useful TFLOP/s over length, forward and backward, one row of panels a mask."""
    found = timed(rows)
    found = found[(found["group"] == "lengths") & found["direction"].isin((FORWARD, BACKWARD))]
    masks = list(dict.fromkeys(found["mask"]))
    if not masks:
        return None
    figure, axes = _figure(len(masks), 2, f"Speed over length\n{title}")
    for line, mask in zip(axes, masks):
        for axis, way in zip(line, (FORWARD, BACKWARD)):
            part = found[(found["mask"] == mask) & (found["direction"] == way)].sort_values("length")
            for peer in reversed(_peers(part)):
                mine = part[part["peer"] == peer]
                axis.plot(mine["length"], mine["tflops"], linewidth=1.2, **_style(peer))
            setup = "" if part.empty else f", D={part.iloc[0]['head_dim']}, {part.iloc[0]['dtype']}"
            axis.set_title(f"{mask}, {way}{setup}", fontsize=9)
            _lengths(axis, sorted(set(found["length"])))
            axis.set_ylim(bottom=0)
            axis.set_ylabel("useful TFLOP/s")
    _legend(figure, _fullest(axes))
    return figure


def memory(rows: pd.DataFrame, title: str) -> Figure | None:
    """Peak memory of a forward and a backward over length, one column of panels a mask: GiB, and how many times what q,
    k, v, the output and their gradients take, which is constant if memory is linear in the length.
    """
    found = derived.memory(rows)
    masks = list(dict.fromkeys(found["mask"]))
    if not masks:
        return None
    figure, axes = _figure(2, len(masks), f"Peak memory of forward and backward\n{title}")
    for column, mask in enumerate(masks):
        part = found[found["mask"] == mask].sort_values("length")
        above, below = axes[0][column], axes[1][column]
        for peer in reversed(_peers(part)):
            mine = part[part["peer"] == peer]
            above.plot(mine["length"], mine["memory_mib"] / 1024, linewidth=1.2, **_style(peer))
            below.plot(mine["length"], mine["floor"], linewidth=1.2, **_style(peer))
        least = part.drop_duplicates("length")
        floor = least["memory_mib"] / least["floor"] / 1024
        line = {"linestyle": "--", "color": "#000000", "linewidth": 0.8, "label": "q, k, v, output and gradients alone"}
        above.plot(least["length"], floor, **line)
        below.plot(least["length"], [1.0] * len(least), **line)
        setup = part.iloc[0]
        above.set_title(f"{mask}, D={setup['head_dim']}, {setup['heads']} heads, {setup['dtype']}", fontsize=9)
        above.set_yscale("log", base=2)
        above.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
        above.set_ylabel("GiB")
        below.set_ylim(bottom=0)
        below.set_ylabel("times the dashed line")
        for axis in (above, below):
            _lengths(axis, sorted(set(found["length"])))
    _legend(figure, _fullest(axes))
    return figure


PICTURES = {"density": density, "lengths": lengths, "memory": memory}


def save(rows: pd.DataFrame, title: str, folder: Path, suffix: str = "") -> dict[str, Path]:
    """Draws all pictures for which there are rows, as PNG files in `folder`. Returns their paths by name."""
    drawn = {}
    for name, draw in PICTURES.items():
        figure = draw(rows.drop_duplicates([*CASE, "peer", "direction"], keep="last"), title)
        if figure is not None:
            drawn[name] = folder / f"{name}{suffix}.png"
            figure.savefig(drawn[name], dpi=130, metadata={"Software": None})
    return drawn

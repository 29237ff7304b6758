from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from experiments.benchmarks.patterns.catalogue import Pattern
from sparseflash import BlockMask
from sparseflash.draw.colours import DEAD_SCORE, FULL, PARTIAL, colours
from sparseflash.draw.scores import kinds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELLS = 256
SIDE = 312  # of a panel, which is a picture and its margins
ABOVE, BELOW = 48, 64  # above a picture: name and density; below: up to three lines of rule
LINE = 36  # characters in a line of a rule
HEADER, TOP, BOTTOM = 40, 76, 16  # a group's name, the page's title and legend
DPI = 120
GRID = "#9aa7b8"
MEANINGS = (
    ((255, 255, 255), "skipped"),
    (FULL, "full tile"),
    (PARTIAL, "live scores of a partial tile (paler: few)"),
    (DEAD_SCORE, "dead scores of a partial tile"),
)


def page(
    patterns: Sequence[Pattern],
    tokens: int,
    block: int,
    *,
    columns: int = 5,
    done: Callable[[Pattern], None] = lambda pattern: None,
) -> Figure:
    """A panel for each pattern, in rows by group; of patterns that differ by head the second head."""
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    groups = [(name, list(members)) for name, members in groupby(patterns, lambda pattern: pattern.group)]
    row = ABOVE + CELLS + BELOW
    height = TOP + BOTTOM + sum(HEADER + row * -(-len(members) // columns) for _, members in groups)
    width = columns * SIDE
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    figure.text(0.5, 1 - 20 / height, title(tokens, block), ha="center", va="center", fontsize=14)
    figure.legend(
        handles=[
            Patch(facecolor=np.divide(colour, 255), edgecolor="#999999", label=text) for colour, text in MEANINGS
        ],
        loc="center", bbox_to_anchor=(0.5, 1 - 52 / height), ncols=4 if columns > 3 else 1, frameon=False,
        fontsize=10.5,
    )  # fmt: skip
    y = height - TOP
    for name, members in groups:
        figure.text(
            (SIDE - CELLS) / 2 / width, (y - HEADER / 2) / height, name,
            fontsize=13, fontweight="bold", va="center", color="#444444",
        )  # fmt: skip
        y -= HEADER
        for number, pattern in enumerate(members):
            column = number % columns
            if column == 0:
                y -= row
            left = column * SIDE + (SIDE - CELLS) // 2
            panel = figure.add_axes((left / width, (y + BELOW) / height, CELLS / width, CELLS / height))
            mask = pattern.build(tokens, block)
            heads = mask.shape[1]
            panel.imshow(
                picture(mask, head=min(1, heads - 1)),
                extent=(0, tokens, tokens, 0),
                interpolation="antialiased",
                zorder=1,
            )
            panel.spines[:].set_position(("outward", 72 / DPI))
            if tokens <= 64 * block:  # finer lines would hide the cells
                # Ticks with grid lines would take most of the drawing time.
                at = range(block, tokens, block)
                lines = [((x, 0), (x, tokens)) for x in at] + [((0, x), (tokens, x)) for x in at]
                panel.add_collection(LineCollection(lines, colors=GRID, linewidths=0.4, alpha=0.35, zorder=2))
            panel.set_xticks([])
            panel.set_yticks([])
            shown = f", head 1 of {heads}" if heads > 1 else ""
            panel.set_title(
                f"{pattern.name}\n{100 * mask.density:.3g} % live{shown}", fontsize=10.5, linespacing=1.25, pad=5
            )
            panel.set_xlabel(textwrap.fill(pattern.rule, LINE), fontsize=9, labelpad=5)
            done(pattern)
    return figure


def title(tokens: int, block: int) -> str:
    return f"{tokens:,} queries down, {tokens:,} keys to the right, in tiles of {block} x {block}"


def picture(mask: BlockMask, head: int = 0) -> NDArray[np.uint8]:
    """One head as an RGB image of at most CELLS x CELLS cells of a whole number of scores.

    A cell with a live score is never as pale as one without, so that single lines of scores remain visible.
    """
    mask = mask.canonical()
    drawn = kinds(mask, int(mask.pattern[0, head]))
    size = -(-max(drawn.shape) // CELLS)
    starts = [np.arange(0, length, size) for length in drawn.shape]

    def share(live: NDArray[np.bool_]) -> NDArray[np.float64]:
        counts = np.add.reduceat(np.add.reduceat(live, starts[0], 0, dtype=np.int64), starts[1], 1)
        areas = [np.minimum(length - start, size) for length, start in zip(live.shape, starts)]
        return counts / np.multiply.outer(*areas)

    found = colours(share(drawn == 3), share(drawn == 2))
    found[(share(drawn == 1) > 0) & (share(drawn >= 2) == 0)] = DEAD_SCORE
    return found


def save(figure: Figure, path: Path) -> Path:
    from io import BytesIO

    from PIL import Image

    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    return path

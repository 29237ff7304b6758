from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.benchmarks.patterns.catalogue import Pattern
from sparseflash.draw.colours import DEAD_SCORE, EMPTY, FULL, PARTIAL, hexadecimal
from sparseflash.draw.scores import MEANINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 5
CELLS = 256  # pixels of a picture
SIDE = 312  # of a panel, which is a picture and its margins
ABOVE, BELOW = 48, 64  # above a picture: name and density; below: up to three lines of rule
LINE = 36  # characters in a line of a rule
HEADER, TOP, BOTTOM = 40, 76, 16  # a group's name, the page's title and legend
DPI = 120


def page(patterns: Sequence[Pattern], tokens: int, block: int) -> Figure:
    """A panel for each pattern, in rows by group; of patterns that differ by head the second head."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    groups = [(name, list(members)) for name, members in groupby(patterns, lambda pattern: pattern.group)]
    row = ABOVE + CELLS + BELOW
    height = TOP + BOTTOM + sum(HEADER + row * -(-len(members) // COLUMNS) for _, members in groups)
    width = COLUMNS * SIDE
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    title = f"{tokens:,} queries down, {tokens:,} keys to the right, in tiles of {block} x {block}"
    figure.text(0.5, 1 - 20 / height, title, ha="center", va="center", fontsize=14)
    figure.legend(
        handles=[
            Patch(facecolor=hexadecimal(colour), edgecolor="#999999", label=text)
            for colour, text in zip((EMPTY, DEAD_SCORE, PARTIAL, FULL), MEANINGS, strict=True)
        ],
        loc="center", bbox_to_anchor=(0.5, 1 - 52 / height), ncols=4, frameon=False, fontsize=10.5,
    )  # fmt: skip
    y = height - TOP
    for name, members in groups:
        figure.text(
            (SIDE - CELLS) / 2 / width, (y - HEADER / 2) / height, name,
            fontsize=13, fontweight="bold", va="center", color="#444444",
        )  # fmt: skip
        y -= HEADER
        for number, pattern in enumerate(members):
            column = number % COLUMNS
            if column == 0:
                y -= row
            left = column * SIDE + (SIDE - CELLS) // 2
            panel = figure.add_axes((left / width, (y + BELOW) / height, CELLS / width, CELLS / height))
            mask = pattern.build(tokens, block)
            heads = mask.shape[1]
            mask.plot(panel, heads=min(1, heads - 1), elements=True, legend=False)
            panel.spines[:].set_position(("outward", 72 / DPI))
            panel.set_ylabel("")
            panel.set_xticks([])
            panel.set_yticks([])
            shown = f", head 1 of {heads}" if heads > 1 else ""
            panel.set_title(
                f"{pattern.name}\n{100 * mask.density:.3g} % live{shown}", fontsize=10.5, linespacing=1.25, pad=5
            )
            panel.set_xlabel(textwrap.fill(pattern.rule, LINE), fontsize=9, labelpad=5)
    return figure


def save(figure: Figure, path: Path) -> Path:
    from io import BytesIO

    from PIL import Image

    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    return path

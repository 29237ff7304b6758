"""Every pattern on one page."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.patterns.catalogue import Pattern

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 13.0  # inches
HEADER, PANEL = 0.42, 1.32  # heights: of a group's name, and of a row of panels over the width of one


def page(
    patterns: Sequence[Pattern],
    tokens: int,
    block: int,
    *,
    columns: int = 5,
    elements: bool = False,
    done: Callable[[Pattern], None] = lambda pattern: None,
) -> Figure:
    """A figure with a panel a pattern, a row or more a group; the first head of patterns that differ by head.

    `done` is called after each pattern.
    """
    # Only here: matplotlib takes a second to import.
    from matplotlib.figure import Figure

    groups = [(name, list(members)) for name, members in groupby(patterns, lambda pattern: pattern.group)]
    side = WIDTH / columns
    heights: list[float] = []
    for _, members in groups:
        heights += [HEADER] + [PANEL * side] * -(-len(members) // columns)
    top, bottom = 0.55, 0.45  # inches, for the title and the legend
    total = sum(heights) + top + bottom
    figure = Figure(figsize=(WIDTH, total), dpi=100)
    figure.text(0.5, 1 - 0.3 / total, title(tokens, block), ha="center", va="center", fontsize=14)
    meanings = {}
    y = total - top  # inches from the bottom
    for name, members in groups:
        y -= HEADER
        figure.text(
            0.012, (y + 0.5 * HEADER) / total, name, fontsize=13, fontweight="bold", va="center", color="#444444"
        )
        for number, pattern in enumerate(members):
            column = number % columns
            if column == 0:
                y -= PANEL * side
            # Above the picture the name and the density, below it up to three lines of rule.
            panel = figure.add_axes((
                (column + 0.08) * side / WIDTH, (y + 0.22 * side) / total, 0.84 * side / WIDTH, 0.84 * side / total
            ))  # fmt: skip
            mask = pattern.build(tokens, block)
            mask.plot(panel, heads=0, batch=0, elements=elements)
            legend = panel.get_legend()
            meanings |= {text.get_text(): patch for text, patch in zip(legend.get_texts(), legend.get_patches())}
            legend.remove()
            heads = f", head 0 of {mask.shape[1]}" if mask.shape[1] > 1 else ""
            panel.set_title(
                f"{pattern.name}\n{100 * mask.density:.3g} % live{heads}", fontsize=10.5, linespacing=1.25, pad=5
            )
            panel.set_ylabel("")
            panel.set_xlabel(textwrap.fill(pattern.rule, 36), fontsize=9, labelpad=5)
            panel.tick_params(labelbottom=False, labelleft=False, length=0)
            done(pattern)
    figure.legend(
        meanings.values(), meanings, loc="center", bbox_to_anchor=(0.5, 0.2 / total), ncols=len(meanings),
        frameon=False, fontsize=11,
    )  # fmt: skip
    return figure


def title(tokens: int, block: int) -> str:
    return f"{tokens:,} queries down, {tokens:,} keys to the right, in tiles of {block} x {block}"


def save(figure: Figure, path: Path) -> Path:
    """Writes the page as a PNG file with a palette: these pictures have few colours, and so half the bytes."""
    from io import BytesIO

    from PIL import Image  # comes with matplotlib

    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    return path

"""A mask as a matplotlib figure.

Only matplotlib's object-oriented interface is used: no backend is selected, no global state changed and no window
opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparseflash.blockmask.arguments import checked_mask, flag, integer
from sparseflash.draw.cells import Shares, shares
from sparseflash.draw.colours import DEAD_SCORE, EMPTY, FULL, GRID, PARTIAL, colours, hexadecimal
from sparseflash.draw.panels import Choice, Panel, chosen, panels
from sparseflash.draw.scores import MEANINGS, kinds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sparseflash.blockmask import BlockMask

MOST_PANELS = 16
MOST_ELEMENTS = 4096  # tokens per side, when single scores are drawn
MOST_IN_GRID = 64  # panels of a grid by head
_ELEMENTS_BY_DEFAULT = 1024
_MOST_GRID = 64  # tiles per side; more grid lines would hide the tiles
_PANEL_INCHES = 4.0


def plot(
    mask: BlockMask,
    ax: Axes | None = None,
    *,
    heads: Choice = None,
    batch: Choice = None,
    elements: bool | None = None,
    cells: int = 512,
    legend: bool = True,
    by_head: bool = False,
) -> Figure | Axes:
    """Implements `BlockMask.plot`.

    >>> from sparseflash import BlockMask
    >>> plot(BlockMask.dense(4096)).axes[0].get_title()
    '100 % live'
    """
    mask = checked_mask(mask)
    try:
        from matplotlib.figure import Figure
    except ImportError as failure:
        raise ImportError("plot needs matplotlib: pip install sparseflash[plot]") from failure
    if integer(cells, "cells", "cells per side") < 1:
        raise ValueError(f"cells must be at least 1 per side; got {cells}.")
    longest = max(mask.q_len, mask.k_len)
    if elements is None:
        elements = longest <= _ELEMENTS_BY_DEFAULT
    elif elements and longest > MOST_ELEMENTS:
        raise ValueError(f"elements=True must have at most {MOST_ELEMENTS} queries and keys; got {longest}.")
    if mask.shape[0] == 0:
        raise ValueError("mask must have at least one batch element to be drawn; got lengths of no sequence.")
    found = panels(mask, heads, batch, by_head=flag(by_head, "by_head"))
    meanings: list[tuple[str, str]] = []
    if ax is not None:
        if not hasattr(ax, "imshow"):
            raise TypeError(
                f"ax must be a matplotlib Axes or None; got {ax!r}. To write a file: mask.plot().savefig('mask.png')."
            )
        if len(found) > 1:
            raise ValueError(
                f"ax must be None to draw {len(found)} distinct patterns; select one with heads= and batch=."
            )
        meanings = _draw(mask, found[0], ax, elements, cells)
        if legend:
            # Below the labels, wherever the caller's layout puts the axes.
            ax.legend(
                handles=_patches(meanings), loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False
            )
        return ax
    most = MOST_IN_GRID if by_head else MOST_PANELS
    drawn = found[:most]
    side = _PANEL_INCHES if len(drawn) > 1 else 1.5 * _PANEL_INCHES
    cols = min(len(drawn), 4)
    if by_head and len(drawn) > 1:
        of_element = len(found) // len(chosen("batch", batch, mask.shape[0]))
        cols = next((n for n in range(min(8, of_element), 3, -1) if of_element % n == 0), min(8, of_element))
        side = _PANEL_INCHES * min(1.0, 4 / cols)
    rows = -(-len(drawn) // cols)
    shape = min(max(mask.q_len / mask.k_len, 0.25), 4.0)
    size = (side * min(1.0, 1 / shape), side * min(1.0, shape))
    figure = Figure(figsize=(cols * size[0] + 0.4, rows * size[1] + 1.5), dpi=130, layout="constrained")
    axes = list(figure.subplots(rows, cols, squeeze=False).flat)
    for panel, panel_axes in zip(drawn, axes):
        meanings += _draw(mask, panel, panel_axes, elements, cells)
    for unused in axes[len(drawn) :]:
        unused.remove()
    left_out = f"; the first {most} of {len(found)} {'panels' if by_head else 'patterns'}" if len(found) > most else ""
    figure.suptitle(
        f"{mask.q_len:,} x {mask.k_len:,} tokens, tiles of {mask.block_q} x {mask.block_k}{left_out}", fontsize=11
    )
    if legend:
        figure.legend(
            handles=_patches(meanings), loc="outside lower center", ncols=2 if cols == 1 else 4, frameon=False
        )
    return figure


def _draw(mask: BlockMask, panel: Panel, ax: Axes, elements: bool, most: int) -> list[tuple[str, str]]:
    down: float = mask.q_len
    across: float = mask.k_len
    if elements:
        palette = np.array([EMPTY, DEAD_SCORE, PARTIAL, FULL], dtype=np.uint8)
        scores = kinds(mask, panel.pattern, lengths=panel.lengths)
        image, share = palette[scores], float((scores >= 2).mean())
        drawn = {0, *np.unique(scores).tolist()}
        meanings = [(hexadecimal(palette[n]), meaning) for n, meaning in enumerate(MEANINGS) if n in drawn]
    else:
        found = shares(mask, panel.pattern, most, most, lengths=panel.lengths)
        image, share = colours(found.full, found.partial), _mean(mask, found)
        meanings = _meanings(found)
        # The image may extend past the ends; the axis limits below cut it.
        down = image.shape[0] * found.step[0] * mask.block_q
        across = image.shape[1] * found.step[1] * mask.block_k
    # "antialiased" averages if there are more cells than pixels; "nearest" would drop thin lines.
    ax.imshow(image, extent=(0, across, down, 0), interpolation="antialiased", aspect="auto")
    ax.set_xlim(0, mask.k_len)
    ax.set_ylim(mask.q_len, 0)
    shape = mask.q_len / mask.k_len
    ax.set_box_aspect(min(max(shape, 0.25), 4.0))
    ax.set_title(f"{panel.title}\n{_percent(share)} live" if panel.title else f"{_percent(share)} live", fontsize=10)
    ax.set_xlabel("key (token)")
    ax.set_ylabel("query (token)")
    for axis, length in ((ax.xaxis, mask.k_len), (ax.yaxis, mask.q_len)):
        at = sorted({round(length * quarter / 4) for quarter in range(5)})
        axis.set_ticks(at, _numbers(at))
    if max(mask.blocks) <= _MOST_GRID:  # two artists: a minor tick for each line would take most of a figure's time
        ax.grid(visible=False)
        ax.vlines(range(0, mask.k_len + 1, mask.block_k), 0, mask.q_len, colors=GRID, linewidths=0.4)
        ax.hlines(range(0, mask.q_len + 1, mask.block_q), 0, mask.k_len, colors=GRID, linewidths=0.4)
    return meanings


def _mean(mask: BlockMask, found: Shares) -> float:
    sides = []
    for count, step, block, length in zip(
        found.full.shape, found.step, (mask.block_q, mask.block_k), (mask.q_len, mask.k_len)
    ):
        sides.append(np.minimum(length - np.arange(count) * step * block, step * block) / length)
    return float(sides[0] @ found.live @ sides[1])


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _meanings(found: Shares) -> list[tuple[str, str]]:
    """Colours and meanings of the legend, for cells of one or of several tiles."""
    one = found.step == (1, 1)
    if one:
        samples = [("full tile", 1.0, 0.0)]
        samples += [(f"partial tile, {_percent(share)} live", 0.0, share) for share in (0.9, 0.1)]
    else:
        size = f"{found.step[0]} x {found.step[1]} tiles"
        samples = [(f"{size}, all live", 1.0, 0.0), ("10 % live, in full tiles", 0.1, 0.0)]
        samples += [("10 % live, in partial tiles", 0.0, 0.1)]
    drawn = [s for s in samples if (s[1] and found.full.any()) or (s[2] and found.partial.any())]
    samples = [("empty: skipped", 0.0, 0.0), *drawn]
    rgb = colours(np.array([s[1] for s in samples]), np.array([s[2] for s in samples]))
    return [(hexadecimal(colour), name) for colour, (name, _, _) in zip(rgb, samples)]


def _patches(meanings: list[tuple[str, str]]) -> list[object]:
    from matplotlib.patches import Patch

    distinct = dict.fromkeys(meanings)
    return [Patch(facecolor=colour, edgecolor="#999999", label=meaning) for colour, meaning in distinct]


def _numbers(ticks: list[int]) -> list[str]:
    """Tick labels in tokens: 250, or 4K (multiples of 1024) or 1M if all ticks are round."""
    if ticks[-1] < 2**13 or any(tick % 2**9 for tick in ticks):
        return [f"{tick}" for tick in ticks]
    unit, letter = (2**20, "M") if all(tick % 2**18 == 0 for tick in ticks) else (2**10, "K")
    return [f"{tick / unit:g}{letter if tick else ''}" for tick in ticks]

"""A mask as text, for terminals and logs."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sparseflash.blockmask.arguments import integer
from sparseflash.draw.cells import Shares, shares
from sparseflash.draw.panels import Choice, panels

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask

BLOCKS = "·░▒▓█"  # empty; below a third live, below two thirds, more; full
ASCII = ".-+*#"
MOST_PANELS = 16


def to_string(
    mask: BlockMask, width: int | None = None, *, heads: Choice = None, batch: Choice = None, ascii: bool = False
) -> str:
    """Implements `BlockMask.to_string`.

    >>> from sparseflash import BlockMask
    >>> print(to_string(BlockMask.from_function(lambda q, k: k <= q, 128, block=64), width=20, ascii=True))
    BlockMask(128 x 128, blocks of 64, 3 tiles: 1 full + 2 partial (1 distinct), density 50.4 %)
    ++..
    ##++
    # full  *+- partly live: 2/3, 1/3, less  . empty; a cell is 64 x 64 tokens
    """
    width = shutil.get_terminal_size().columns if width is None else integer(width, "width", "columns")
    if width < 2:
        raise ValueError(f"width must be at least 2 columns; got {width}.")
    glyphs = ASCII if ascii else BLOCKS
    lines = [repr(mask)]
    found = panels(mask, heads, batch)
    step = (1, 1)
    for panel in found[:MOST_PANELS]:
        # A cell is two columns wide, because a character is about twice as tall as wide.
        cells = shares(mask, panel.pattern, rows=width // 2, cols=width // 2, lengths=panel.lengths)
        lines += [f"{panel.title}:"] if panel.title else []
        lines += ["".join(2 * glyphs[level] for level in row) for row in levels(cells).tolist()]
        step = cells.step
    if len(found) > MOST_PANELS:
        lines.append(f"({len(found) - MOST_PANELS} more patterns; select with heads= and batch=)")
    empty, few, some, many, full = tuple(glyphs)
    size = f"{step[0] * mask.block_q} x {step[1] * mask.block_k} tokens"
    lines.append(f"{full} full  {many}{some}{few} partly live: 2/3, 1/3, less  {empty} empty; a cell is {size}")
    return "\n".join(lines)


def levels(cells: Shares) -> NDArray[np.int64]:
    """The level of each cell, from 0 (empty) to 4 (only full tiles)."""
    live = cells.live
    partial = 1 + (live >= 1 / 3).astype(np.int64) + (live >= 2 / 3)
    return np.where(cells.full == 1, 4, np.where(live > 0, partial, 0))

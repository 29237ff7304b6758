"""Lists of tiles: ranges of columns a block row, and graphs of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask


def between(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """`(rows, cols)` of the tiles `first[i] <= j <= last[i]` of every block row i, sorted; none where last < first.

    `first`, `last`: int64 `[Mq]`, block columns.

    >>> rows, cols = between(torch.tensor([0, 2, 5]), torch.tensor([1, 2, 4]))
    >>> rows.tolist(), cols.tolist()
    ([0, 0, 1], [0, 1, 2])
    """
    counts = (last - first + 1).clamp(min=0)
    rows = torch.repeat_interleave(torch.arange(len(first)), counts)
    cols = torch.arange(len(rows)) - (counts.cumsum(0) - counts - first)[rows]
    return rows, cols


def of_blocks(rows: Tensor, cols: Tensor, q_len: int, *, causal: bool, block: int) -> BlockMask:
    """The mask of a graph of blocks: tile (i, j) is full for every edge, given any number of times, in any order.

    `causal` drops the edges with j > i, and cuts the diagonal tiles to `k <= q`.
    """
    count = -(-q_len // block)
    key = torch.unique(rows * count + cols)
    rows, cols = key // count, key % count
    if not causal:
        return BlockMask.from_tiles(rows, cols, q_len, block=block)
    rows, cols = rows[cols <= rows], cols[cols <= rows]
    triangle = torch.ones(1, block, block, dtype=torch.bool).tril()
    return BlockMask.from_tiles(rows, cols, q_len, block=block, tile=(rows == cols).long(), live=triangle)

"""The kind of every single score of a small mask, for pictures that show each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from sparseflash.blockmask import bitmask
from sparseflash.blockmask.arguments import checked_mask
from sparseflash.blockmask.walks import walk

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask

MEANINGS = (
    "empty tile: skipped",
    "partial tile: dead score",
    "partial tile: live score",
    "full tile: all scores live",
)


def kinds(mask: BlockMask, pattern: int = 0, *, lengths: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """The kind of each score: uint8 `[q_len, k_len]`, an index into `MEANINGS`. Takes `N x N` memory.

    >>> from sparseflash import BlockMask
    >>> kinds(BlockMask.from_function(lambda q, k: k < 20, 4, 64, block=(16, 16)))[0, ::5].tolist()
    [2, 2, 2, 2, 1, 1, 1, 0, 0, 0, 0, 0, 0]

    `pattern`, `lengths` as for `shares`. A tile past an end is empty; a tile that an end cuts is partial.
    """
    (row_blocks, col_blocks), block_q, block_k = checked_mask(mask).blocks, mask.block_q, mask.block_k
    tiles = walk(mask.to("cpu"), pattern, lengths)
    bits = bitmask.unpack(tiles.bits, block_k).to(torch.uint8)
    choices = torch.cat([torch.full((1, block_q, block_k), 3, dtype=torch.uint8, device="cpu"), 1 + bits])
    grid = torch.zeros(row_blocks, block_q, col_blocks, block_k, dtype=torch.uint8, device="cpu")
    grid[tiles.rows, :, tiles.cols] = choices[tiles.kind]
    drawn = grid.view(row_blocks * block_q, col_blocks * block_k)[: mask.q_len, : mask.k_len]
    found: NDArray[np.uint8] = drawn.numpy()
    return found

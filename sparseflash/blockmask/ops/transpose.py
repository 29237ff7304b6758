"""The transpose of a mask: queries and keys exchanged."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.bitmask import WORD
from sparseflash.blockmask.ops.tilelist import TileList, in_chunks, mask_of, tiles_of


def transpose(mask: BlockMask) -> BlockMask:
    """See `BlockMask.transpose`."""
    stored, (row_blocks, col_blocks) = tiles_of(mask), mask.blocks
    words = in_chunks(lambda some: transposed(some, mask.block_k), mask.bits, mask.block_q * mask.block_k // WORD)
    made = TileList(
        mask.k_len, mask.q_len, mask.block_k, mask.block_q,
        stored.row // row_blocks * col_blocks + stored.col, stored.row % row_blocks, stored.kind,
        words, stored.pattern, stored.patterns,
    )  # fmt: skip
    return mask_of(made, None if mask.lengths is None else mask.lengths.flip(0))


def transposed(words: Tensor, block_k: int) -> Tensor:
    """The words of transposed tiles: int32 `[T, block_q, W]` to `[T, block_k, W']`.

    A square of 32 x 32 bits is transposed by exchanging two of its quarters, then two of each quarter's quarters, and
    so on (Warren, Hacker's Delight, section 7-3), so that no bit is unpacked.
    """
    count, block_q, width = words.shape
    if block_q < WORD:  # blocks of 16 fill half a square
        words = torch.cat([words, torch.zeros_like(words)], dim=1)
    across = words.shape[1] // WORD
    square = words.reshape(count, across, WORD, width).permute(0, 3, 2, 1)  # [T, W, 32 queries, block_q / 32]
    square = square.clone(memory_format=torch.contiguous_format)  # a copy, because the loop below writes to it
    for half, low in ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        upper, lower = square.view(count, width, WORD // (2 * half), 2, half, across).unbind(3)  # views of the square
        # `low` discards the copies of the sign bit that the shift of an int32 makes.
        differ = ((upper >> half) ^ lower) & low
        lower ^= differ
        upper ^= differ << half
    return square.flatten(1, 2)[:, :block_k].contiguous()

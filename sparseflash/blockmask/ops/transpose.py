"""The transpose of a mask: queries and keys exchanged."""

from __future__ import annotations

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.bitmask import WORD, transposed
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

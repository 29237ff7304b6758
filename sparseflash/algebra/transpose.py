"""Queries and keys exchanged."""

from __future__ import annotations

from torch import Tensor

from sparseflash import tiles
from sparseflash.algebra.tilelist import TileList, in_chunks, mask_of, tiles_of
from sparseflash.blockmask import BlockMask


def transpose(mask: BlockMask) -> BlockMask:
    """See `BlockMask.transpose`."""
    stored, (row_blocks, col_blocks) = tiles_of(mask), mask.blocks

    def transposed(words: Tensor) -> Tensor:
        return tiles.pack(tiles.unpack(words, mask.block_k).transpose(-1, -2))

    # Bits are unpacked on the way, so a score counts as a word of temporaries.
    words = in_chunks(transposed, mask.bits, mask.block_q * mask.block_k)
    made = TileList(
        mask.k_len, mask.q_len, mask.block_k, mask.block_q,
        stored.row // row_blocks * col_blocks + stored.col, stored.row % row_blocks, stored.kind,
        words, stored.pattern, stored.patterns,
    )  # fmt: skip
    return mask_of(made, mask.lengths)

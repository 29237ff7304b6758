"""Dense attention: every query sees every key."""

from __future__ import annotations

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block
from sparseflash.masks.tiling.signatures import pattern


@pattern
def dense(q_len: int, k_len: int | None = None, *, block: Block = 128) -> BlockMask:
    """Every score is live. Use it to compare other masks with, or to combine with them.

    >>> dense(256, 512)
    BlockMask(256 x 512, blocks of 128, 8 tiles: 8 full + 0 partial, density 100 %)

        X X X X
        X X X X

    `attention(q, k, v)` without a mask computes the same and stores nothing.

    Args:
        q_len, k_len: tokens; `k_len` defaults to `q_len`.
        block: tokens per side of a tile.
    """
    return BlockMask.dense(q_len, k_len, block=block)

"""Dense attention: every query sees every key."""

from __future__ import annotations

import numpy as np

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, block_pair, token_counts
from sparseflash.blockmask.recorded import Runs, mask_of_runs
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

    def runs() -> Runs:
        size = token_counts(q_len, q_len if k_len is None else k_len)
        ends = np.zeros((4, size[0]), dtype=np.int64)
        ends[1] = size[1]
        return Runs(*size, block_pair(block), ends)

    return mask_of_runs(runs, lambda: BlockMask.dense(q_len, k_len, block=block))

"""Causal attention: no query sees a later key."""

from __future__ import annotations

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block
from sparseflash.blockmask.cache import mask_cache, once
from sparseflash.masks.tiling.arguments import with_cache
from sparseflash.masks.tiling.band import band
from sparseflash.masks.tiling.signatures import pattern


@pattern
def causal(q_len: int, k_len: int | None = None, *, offset: int | None = None, block: Block = 128) -> BlockMask:
    """Every query sees the keys up to its own position, by default aligned at the bottom right.

    >>> causal(4096)
    BlockMask(4096 x 4096, blocks of 128, 528 tiles: 496 full + 32 partial (1 distinct), density 50 %)

    Score (q, k) is live iff

        k <= q + offset        (offset = k_len - q_len by default)

    Args:
        q_len, k_len: tokens; `k_len` defaults to `q_len`.
        offset: the position of query 0 among the keys.
        block: tokens per side of a tile.

    By default the last query sees the last key: with a cache of earlier keys (`k_len > q_len`) the new queries see all
    of it, and with `k_len < q_len` the first `q_len - k_len` queries see nothing. FlashAttention and xformers align the
    same way; FlexAttention's examples and PyTorch's `is_causal` align at the top left, which is `offset=0`. A negative
    offset leaves the first queries without keys; `offset=-1` hides a query's own position.

          k →
        q X . . .
        ↓ X X . .
          X X X .
          X X X X

    >>> causal(2, 4, block=16).to_dense()[0, 0].int().tolist()
    [[1, 1, 1, 0], [1, 1, 1, 1]]
    >>> causal(2, 4, offset=0, block=16).to_dense()[0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0]]
    """
    q_len, k_len, offset = with_cache(q_len, k_len, offset)
    return band(q_len, k_len, 0, None, shift=offset, block=block)


def is_causal(mask: BlockMask) -> bool:
    """Whether no query sees a later key, aligned at the bottom right. Lengths are left out: padding only hides scores.

    >>> is_causal(causal(100, 200)), is_causal(causal(100, 200, offset=101))
    (True, False)

    Computed once for a mask that is not dynamic; synchronises with the device.
    """

    def computed() -> bool:
        # Masks that differ only in their lengths share the cache.
        limit = causal(mask.q_len, mask.k_len, block=(mask.block_q, mask.block_k)).to(mask.device)
        return (mask._padded(None) - limit).indices.numel() == 0

    return once(mask_cache(mask.indices), "is causal", computed)

"""Chunks: the sequence cut into pieces of one length, each attending within itself."""

from __future__ import annotations

import torch

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, flag, token_counts
from sparseflash.masks.tiling.arguments import at_least
from sparseflash.masks.tiling.signatures import pattern
from sparseflash.masks.tiling.spans import spans


@pattern
def chunked(q_len: int, *, chunk: int, causal: bool = False, block: Block = 128) -> BlockMask:
    """Chunks of `chunk` tokens that do not see one another (block-local attention).

    >>> chunked(4096, chunk=512)
    BlockMask(4096 x 4096, blocks of 128, 128 tiles: 128 full + 0 partial, density 12.5 %)

    Score (q, k) is live iff

        q // chunk == k // chunk            (causal: and k <= q)

    The last chunk may be short. No information crosses the border of a chunk, at any depth: combine it with another
    pattern, in the same layer or in another.

    Source: blockwise attention of BlockBERT (Qiu et al., 2020) and the local layers of Llama 4 (causal; there it is
    called chunked attention, and its borders lie at multiples of the chunk, as here).

    Args:
        q_len, chunk: tokens; `chunk` need not be a multiple of the block, but then most tiles are partial.
        causal: no query sees a key after it.
        block: tokens per side of a tile.

    Raises ValueError if `chunk` is not positive.

        chunk 2, 5 tokens    causal
        X X . . .            X . . . .
        X X . . .            X X . . .
        . . X X .            . . X . .
        . . X X .            . . X X .
        . . . . X            . . . . X
    """
    q_len, _ = token_counts(q_len, q_len)
    chunk = at_least(1, chunk, "chunk", "tokens")
    q = torch.arange(q_len, device="cpu")
    start = q // chunk * chunk
    return spans(start, q + 1 if flag(causal, "causal") else start + chunk, q_len, block=block)

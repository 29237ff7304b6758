"""Prefix language models: a prefix that every token sees, and causal attention after it."""

from __future__ import annotations

import torch

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, token_counts
from sparseflash.masks.tiling.arguments import at_least
from sparseflash.masks.tiling.signatures import pattern
from sparseflash.masks.tiling.spans import spans


@pattern
def prefix_lm(q_len: int, k_len: int | None = None, *, prefix: int, block: Block = 128) -> BlockMask:
    """The first `prefix` keys are seen by every query, the others causally.

    >>> prefix_lm(4096, prefix=1024)
    BlockMask(4096 x 4096, blocks of 128, 556 tiles: 532 full + 24 partial (1 distinct), density 53.1 %)

    Score (q, k) is live iff

        k < prefix  or  k <= q + (k_len - q_len)

    so attention is bidirectional within the prefix. With `prefix=0` it is `causal`; a prefix of `k_len` or more is
    dense. For a different prefix in each batch element, build one mask each and combine them with `masks.per_batch`.

    Source: T5 (Raffel et al., 2020, section 3.2.1), after Liu et al. (2018). attention-gym's `prefix_lm` is the same.

    Args:
        q_len, k_len: tokens; `k_len` defaults to `q_len`. If they differ, the mask is aligned at the bottom right, as
            in `causal`.
        prefix: tokens.
        block: tokens per side of a tile.

    Raises ValueError if `prefix` is negative.

        prefix 2
        X X . .
        X X . .
        X X X .
        X X X X
    """
    q_len, k_len = token_counts(q_len, q_len if k_len is None else k_len)
    prefix = at_least(0, prefix, "prefix", "tokens")
    stop = (torch.arange(q_len, device="cpu") + (k_len - q_len + 1)).clamp(min=prefix)
    return spans(torch.zeros(q_len, dtype=torch.int64, device="cpu"), stop, k_len, block=block)

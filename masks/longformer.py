"""Longformer: a sliding window, and a few global tokens that see every token and are seen by every token."""

from __future__ import annotations

from typing import Any

import torch

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, flag, token_counts
from sparseflash.masks.tiling.arguments import at_least, is_list, positions
from sparseflash.masks.tiling.signatures import pattern
from sparseflash.masks.tiling.spans import spans


@pattern
def longformer(q_len: int, *, window: int, global_tokens: Any, causal: bool = False, block: Block = 128) -> BlockMask:
    """A sliding window of `window` keys, and global tokens that see everything and are seen by everything.

    >>> longformer(4096, window=512, global_tokens=1)
    BlockMask(4096 x 4096, blocks of 128, 212 tiles: 94 full + 118 partial (6 distinct), density 12.2 %)

    Score (q, k), with G the set of global tokens, is live iff

        |q - k| <= window // 2  or  q in G  or  k in G                       (bidirectional)
        k <= q  and  (q - window < k  or  q in G  or  k in G)                (causal)

    `window` counts as in `local`: a query sees `2 * (window // 2) + 1` keys of it, its own included, or `window` keys
    if causal. Hugging Face's `attention_window` is the same number and must be even (so window + 1 keys). Longformer's
    own code projects q, k and v of global tokens with separate weights, which does not concern the mask.

    Source: Longformer (Beltagy et al., 2020), section 3.1; ETC (Ainslie et al., 2020) puts the global tokens first.

    Args:
        q_len: tokens.
        window: keys; see above.
        global_tokens: a number g (the first g tokens), or a list (or 1-D tensor or array) of positions.
        causal: no query sees a key after it.
        block: tokens per side of a tile.

    Every global token adds a row and a column of scores, and its block a row and a column of tiles. Raises ValueError
    if `window` is not positive or a position lies outside of the sequence.

        window 3, global_tokens 1     causal, window 2, global_tokens [2]
        X X X X X                     X . . . .
        X X X . .                     X X . . .
        X X X X .                     X X X . .
        X . X X X                     . . X X .
        X . . X X                     . . X X X
    """
    q_len, _ = token_counts(q_len, q_len)
    window, causal = at_least(1, window, "window", "keys"), flag(causal, "causal")
    marked = torch.zeros(q_len, dtype=torch.bool, device="cpu")
    if is_list(global_tokens):
        marked[positions(global_tokens, "global_tokens", q_len)] = True
    else:
        marked[: at_least(0, global_tokens, "global_tokens", "tokens")] = True
    q = torch.arange(q_len, device="cpu")
    start, stop = (q - window + 1, q + 1) if causal else (q - window // 2, q + window // 2 + 1)
    limit = q + 1 if causal else None
    return spans(start, stop, q_len, limit=limit, rows=marked, cols=marked, block=block)

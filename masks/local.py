"""Sliding windows: every query sees the keys near its own position, all of them or one in every few."""

from __future__ import annotations

import torch

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, flag, token_counts
from sparseflash.masks.tiling.arguments import at_least, with_cache
from sparseflash.masks.tiling.band import band
from sparseflash.masks.tiling.diagonals import diagonals
from sparseflash.masks.tiling.signatures import pattern


@pattern
def local(
    q_len: int, k_len: int | None = None, *, window: int | None = None, causal: bool = False,
    left: int | None = None, right: int | None = None, offset: int | None = None, block: Block = 128,
) -> BlockMask:  # fmt: skip
    """A sliding window over a sequence of `q_len` tokens. With `causal`, a query sees `window` keys, its own included;
    without, `window // 2` keys on each side and its own; or `left` keys before, `right` keys after, and its own.

    >>> local(4096, window=256, block=64)
    BlockMask(4096 x 4096, blocks of 64, 314 tiles: 190 full + 124 partial (2 distinct), density 6.18 %)

    Score (q, k), with p = q + offset the position of query q among the keys, is live iff

        causal:         p - window < k <= p           (window keys, the query's own included)
        bidirectional:  |p - k| <= window // 2        (2 * (window // 2) + 1 keys, the query's own included)
        left, right:    p - left <= k <= p + right    (left + 1 + right keys)

    cropped at the ends of the sequence. A bidirectional window has an odd number of keys: `window=254` and `window=255`
    both give 127 keys to each side, and `window=256` gives 257. In the causal form Hugging Face, Sparse Transformer and
    this function count `window` keys; FlashAttention's `window_size=(w, 0)`, Splash and attention-gym see `w + 1`.
    `left` and `right` are FlashAttention's `window_size=(left, right)`; for its -1 (no limit) write `k_len`. With a
    cache of earlier keys (`k_len > q_len`) the last query has the position of the last key, as in `causal`.

    Source: Longformer (Beltagy et al., 2020), section 3.1; Sparse Transformer (Child et al., 2019).

    Args:
        q_len, k_len: tokens; `k_len` defaults to `q_len`.
        window: keys; see above.
        causal: no query sees a key after it.
        left, right: keys before and after the query's own, instead of `window`.
        offset: the position of query 0 among the keys, `k_len - q_len` by default.
        block: tokens per side of a tile.

    Raises TypeError if none of `window`, `left` and `right` is given. Raises ValueError if `window` is not positive, if
    only one of `left` and `right` is given, if one is negative, or if they are given with `window` or `causal`.

        causal, window 2     bidirectional, window 3     left 2, right 1
        X . . .              X X . .                     X X . .
        X X . .              X X X .                     X X X .
        . X X .              . X X X                     X X X X
        . . X X              . . X X                     . X X X

    >>> local(4, window=2, causal=True, block=16).to_dense()[0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    >>> local(4096, left=255, right=0) == local(4096, window=256, causal=True)
    True
    >>> local(2, 6, window=2, causal=True, block=16).to_dense()[0, 0].int().tolist()
    [[0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1]]
    >>> [int(local(4096, window=window).to_dense()[0, 0, 2048].sum()) for window in (254, 255, 256)]
    [255, 255, 257]
    """
    causal = flag(causal, "causal")
    q_len, k_len, offset = with_cache(q_len, k_len, offset)
    if left is not None or right is not None:
        if window is not None or causal or left is None or right is None:
            raise ValueError(
                "local must have either window or both of left and right, without causal (right=0 is causal); got "
                f"window={window}, causal={causal}, left={left}, right={right}."
            )
        left, right = at_least(0, left, "left", "keys"), at_least(0, right, "right", "keys")
        return band(q_len, k_len, -right, left, shift=offset, block=block)
    if window is None:
        given = f" A second number is k_len; a window goes by name: local({q_len}, window={k_len})."
        raise TypeError(
            "local must have window=, or left= and right=; got none of them." + (given if k_len != q_len else "")
        )
    window = at_least(1, window, "window", "keys")
    if causal:
        return band(q_len, k_len, 0, window - 1, shift=offset, block=block)
    return band(q_len, k_len, -(window // 2), window // 2, shift=offset, block=block)


@pattern
def dilated(q_len: int, *, window: int, dilation: int, causal: bool = False, block: Block = 128) -> BlockMask:
    """A sliding window of `window` keys that are `dilation` apart, so that it reaches `dilation` times as far.

    >>> dilated(4096, window=65, dilation=4)
    BlockMask(4096 x 4096, blocks of 128, 94 tiles: 0 full + 94 partial (3 distinct), density 1.56 %)

    Score (q, k) is live iff `(q - k) % dilation == 0` and

        causal:         q - window * dilation < k <= q          (window keys, the query's own included)
        bidirectional:  |q - k| <= (window // 2) * dilation     (2 * (window // 2) + 1 keys, the query's own included)

    With `dilation=1` it is `local`. `window` counts keys, as in Longformer; attention-gym's dilated window counts the
    tokens that it spans. Tokens with different remainders modulo `dilation` never see one another, at any depth:
    combine dilations over the heads (`masks.per_head`) or layers. Every tile is partial unless `dilation` is 1; sorting
    the tokens by their remainder turns the pattern into a window again. Source: Longformer (Beltagy et al., 2020),
    section 3.1.

    Args:
        q_len: tokens.
        window: keys.
        dilation: the distance of two keys, in tokens.
        causal: no query sees a key after it.
        block: tokens per side of a tile.

    Raises ValueError if `window` or `dilation` is not positive.

        window 3, dilation 2    causal, window 2, dilation 3
        X . X . .               X . . . .
        . X . X .               . X . . .
        X . X . X               . . X . .
        . X . X .               X . . X .
        . . X . X               . X . . X

    >>> dilated(4096, window=65, dilation=1) == local(4096, window=65)
    True
    """
    q_len, _ = token_counts(q_len, q_len)
    window, dilation = at_least(1, window, "window", "keys"), at_least(1, dilation, "dilation", "tokens")
    causal = flag(causal, "causal")
    within = (q_len - 1) // dilation
    farthest = min(window - 1 if causal else window // 2, within)
    steps = torch.arange(0 if causal else -farthest, farthest + 1, device="cpu")
    return diagonals(steps * dilation, q_len, block=block)

"""Sliding windows: every query sees the keys near its own position."""

from __future__ import annotations

from sparseflash.blockmask import BlockMask
from sparseflash.checks import Block, integer
from sparseflash.masks.band import band


def local(q_len: int, window: int, *, causal: bool = False, block: Block = 128) -> BlockMask:
    """A sliding window of `window` keys over a sequence of `q_len` tokens.

    Score (q, k) is live iff

        causal:         q - window < k <= q           (window keys, the query's own included)
        bidirectional:  |q - k| <= window // 2        (window keys if window is odd, window + 1 if it is even)

    cropped at the ends of the sequence. Conventions differ between systems: Hugging Face, Sparse Transformer and this
    function count `window` keys in the causal form; FlashAttention's `window_size=(w, 0)`, Splash and attention-gym
    see `w + 1`. Source: Longformer (Beltagy et al., 2020), section 3.1; Sparse Transformer (Child et al., 2019).

    `q_len`, `window`, `block` in tokens. Raises ValueError if `window` is not positive.

        causal, window 2     bidirectional, window 3
        X . . .              X X . .
        X X . .              X X X .
        . X X .              . X X X
        . . X X              . . X X

    >>> local(4096, 256, block=64)
    BlockMask(4096 x 4096, blocks of 64, 314 tiles: 190 full + 124 partial (2 distinct), density 6.18 %)
    >>> local(4, 2, causal=True, block=16).to_dense()[0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    window = integer(window, "window", "keys")
    if window < 1:
        raise ValueError(f"window must be at least 1 key; got {window}.")
    if causal:
        return band(q_len, q_len, 0, window - 1, block=block)
    return band(q_len, q_len, -(window // 2), window // 2, block=block)

"""Butterfly attention: block i sees the blocks one butterfly factor away, so log2 many blocks reach all."""

from __future__ import annotations

import torch

from sparseflash.blockmask import BlockMask
from sparseflash.checks import block_pair, integer, token_counts


def butterfly(q_len: int, *, block: int = 128, factors: int | None = None, causal: bool = False) -> BlockMask:
    """The flat block butterfly over the `nb = ceil(q_len / block)` blocks of a sequence.

    Score (q, k) with `i = q // block`, `j = k // block` is live iff

        bidirectional:  i == j  or  i XOR j is in {1, 2, 4, ..., 2^(factors - 1)}
        causal:         (i == j and k <= q)  or  i - j is in {1, 2, 4, ..., 2^(factors - 1)}

    Partners past the end are dropped, so any length goes; the graph of blocks stays connected, and
    `ceil(log2 nb)` layers reach everything. `factors` keeps the smallest strides only; by default there are all
    `ceil(log2 nb)` of them. The causal form is the shift butterfly, because the lower triangle of the XOR form can
    never reach most of the past: block i would reach only the blocks whose bits are a subset of i's, at any depth.

    Source: the union of butterfly factors is Pixelated Butterfly's flat block butterfly (Chen et al., 2021, section
    3.2), which FlashAttention (Dao et al., 2022, section 3.3) uses for its block-sparse attention. Neither publishes
    the block size or the number of factors of its attention experiments, and the released code of the former defines
    it for weight matrices: it needs a power of two and lets the tile absorb other lengths.

    `q_len` and `block` in tokens. Raises ValueError if `factors` is not between 0 and `ceil(log2 nb)`.

        8 blocks      causal
        X X X . X . . .    \\ . . . . . . .
        X X . X . X . .    X \\ . . . . . .
        X . X X . . X .    X X \\ . . . . .
        . X X X . . . X    . X X \\ . . . .
        X . . . X X X .    X . X X \\ . . .
        . X . . X X . X    . X . X X \\ . .
        . . X . X . X X    . . X . X X \\ .
        . . . X . X X X    . . . X . X X \\

    >>> butterfly(16_384)
    BlockMask(16384 x 16384, blocks of 128, 1024 tiles: 1024 full + 0 partial, density 6.25 %)
    >>> butterfly(1024, factors=1).density
    0.25
    >>> butterfly(1000, block=64, causal=True).to_dense().triu(1).any().item()
    False
    """
    if not isinstance(block, int):
        raise TypeError(f"block must be an int (butterfly blocks are square); got {block!r}.")
    block, _ = block_pair(block)
    q_len, _ = token_counts(q_len, q_len)
    count = -(-q_len // block)
    most = max(count - 1, 0).bit_length()  # ceil(log2(count))
    factors = most if factors is None else integer(factors, "factors", "strides")
    if not 0 <= factors <= most:
        raise ValueError(f"factors must lie between 0 and {most} for {count} blocks of {block}; got {factors}.")
    i = torch.arange(count)
    rows, cols = [i], [i]
    for factor in range(factors):
        partner = i - (1 << factor) if causal else i ^ (1 << factor)
        exists = (partner >= 0) & (partner < count)
        rows.append(i[exists])
        cols.append(partner[exists])
    tile = live = None
    if causal:
        tile = torch.zeros(sum(map(len, rows)), dtype=torch.int64)
        tile[:count] = 1
        live = torch.ones(1, block, block, dtype=torch.bool).tril()
    return BlockMask.from_tiles(torch.cat(rows), torch.cat(cols), q_len, block=block, tile=tile, live=live)

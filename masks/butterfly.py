"""Butterfly attention: a block sees blocks at distances of powers of two; log2(blocks) layers connect all blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import flag, integer, integers
from sparseflash.masks.tiling.arguments import at_least, square_blocks
from sparseflash.masks.tiling.listing import of_blocks
from sparseflash.masks.tiling.signatures import pattern


@pattern
def butterfly(
    q_len: int, *, factors: int | None = None, strides: Sequence[int] | None = None, radix: int = 2,
    global_blocks: int = 0, layer: int | None = None, causal: bool = False, block: int = 128,
) -> BlockMask:  # fmt: skip
    """The flat block butterfly over the `nb = ceil(q_len / block)` blocks of a sequence.

    >>> butterfly(16_384)
    BlockMask(16384 x 16384, blocks of 128, 1024 tiles: 1024 full + 0 partial, density 6.25 %)

    Score (q, k) with `i = q // block`, `j = k // block` is live iff, for radix 2,

        bidirectional:  i == j  or  i XOR j is in {1, 2, 4, ..., 2^(factors - 1)}
        causal:         (i == j and k <= q)  or  i - j is in {1, 2, 4, ..., 2^(factors - 1)}

    and for radix r, where a stride is `s = r^f`, for f below `factors`,

        bidirectional:  i == j  or, for some s, i and j written in base r differ in the digit of s only
        causal:         (i == j and k <= q)  or, for some s, i - j is in {s, 2 s, ..., (r - 1) s}

    Any length is allowed: blocks past the end are left out. After `ceil(log_r nb)` layers every block depends on every
    block (causal: on every earlier one). The causal form subtracts (`i - j`), because the causal half of the XOR form
    never reaches most of the past at any depth: block i would depend only on the blocks whose bits are a subset of i's.

    Args:
        q_len: tokens.
        factors: the number of the smallest strides that are kept; by default all `ceil(log_r nb)`.
        strides: the strides themselves instead, in blocks.
        radix: r.
        global_blocks: a number of blocks at the start that see all blocks, and that all blocks see (causal: where
            `k <= q`). They take the place of Pixelated Butterfly's low-rank term.
        layer: the number of the layer that the mask is for, from 0. It has one stride only, number
            `layer % len(strides)`, and a block row has r live tiles. Use one mask a layer:
            `[butterfly(n, layer=l) for l in range(depth)]`. `len(strides)` layers connect all blocks if the mask is
            causal or nb is a power of the radix; otherwise up to twice as many. By default (None) every layer has all
            strides.
        causal: no query sees a key after it.
        block: tokens per side of a tile.

    Source: Pixelated Butterfly's flat block butterfly (Chen et al., 2021, section 3.2), which FlashAttention (Dao et
    al., 2022, section 3.3) uses for its block-sparse attention; neither publishes the block size or the number of
    factors. Pixelated Butterfly's code is for weight matrices: it needs a power of two and counts `global_size` in
    elements. The form with `layer` is a product of factors (Dao et al., 2019, "Learning fast algorithms for linear
    transforms"), as in the butterfly attention of Dimension Mixer (2023).

    Raises ValueError if `factors` is not between 0 and `ceil(log_r nb)`, a stride is not one of those powers of the
    radix, both are given, `radix` is below 2, or `global_blocks` or `layer` is negative.

        8 blocks           causal             radix 3            1 global block     layer 1
        X X X . X . . .    \\ . . . . . . .    X X X X . . X .    X X X X X X X X    X . X . . . . .
        X X . X . X . .    X \\ . . . . . .    X X X . X . . X    X X . X . X . .    . X . X . . . .
        X . X X . . X .    X X \\ . . . . .    X X X . . X . .    X . X X . . X .    X . X . . . . .
        . X X X . . . X    . X X \\ . . . .    X . . X X X X .    X X X X . . . X    . X . X . . . .
        X . . . X X X .    X . X X \\ . . .    . X . X X X . X    X . . . X X X .    . . . . X . X .
        . X . . X X . X    . X . X X \\ . .    . . X X X X . .    X X . . X X . X    . . . . . X . X
        . . X . X . X X    . . X . X X \\ .    X . . X . . X X    X . X . X . X X    . . . . X . X .
        . . . X . X X X    . . . X . X X \\    . X . . X . X X    X . . X . X X X    . . . . . X . X

    >>> butterfly(1024, factors=1).density
    0.25
    >>> butterfly(1000, block=64, causal=True).to_dense().triu(1).any().item()
    False
    >>> butterfly(16_384, radix=4, factors=1) == butterfly(16_384, radix=4, strides=[1])
    True
    >>> [butterfly(1024, layer=layer, block=128).indices[:2].tolist() for layer in range(4)]
    [[0, 1], [0, 2], [0, 4], [0, 1]]
    """
    q_len, block, count = square_blocks(q_len, block, "butterfly")
    radix = min(at_least(2, radix, "radix", ""), max(count, 2))
    global_blocks = at_least(0, global_blocks, "global_blocks", "blocks")
    chosen = _strides(count, block, radix, factors, strides)
    if layer is not None:
        layer = integer(layer, "layer", "layers")
        if layer < 0:
            raise ValueError(f"layer must be at least 0 layers; got {layer}.")
        chosen = chosen[layer % len(chosen) :][:1] if chosen else []
    i = torch.arange(count, device="cpu")
    rows, cols = partners(count, chosen, radix, flag(causal, "causal"))
    stripe = torch.arange(min(global_blocks, count), device="cpu")
    along, across = i.repeat(len(stripe)), stripe.repeat_interleave(count)
    edges = torch.cat([rows, along, across]), torch.cat([cols, across, along])
    return of_blocks([edges], q_len, causal=causal, block=block)


def powers(count: int, radix: int) -> list[int]:
    """The strides 1, r, r^2, ... below `count`: as many as the base-r digits of `count - 1`.

    >>> powers(9, 2), powers(9, 3), powers(1, 2)
    ([1, 2, 4, 8], [1, 3], [])
    """
    found, stride = [], 1
    while stride < count:
        found.append(stride)
        stride *= radix
    return found


def partners(count: int, strides: Sequence[int], radix: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Edges `(i, j)` between `count` nodes: each with itself and with its partners at each stride, powers of `radix`;
    an edge that two strides share comes twice.
    """
    i = torch.arange(count, device="cpu")
    rows, cols = [i], [i]
    for stride in strides:
        digit = i // stride % radix
        for step in range(1, radix):
            partner = i - step * stride if causal else i + ((digit + step) % radix - digit) * stride
            exists = (partner >= 0) & (partner < count)
            rows.append(i[exists])
            cols.append(partner[exists])
    return torch.cat(rows), torch.cat(cols)


def _strides(count: int, block: int, radix: int, factors: int | None, strides: Sequence[int] | None) -> list[int]:
    there = powers(count, radix)
    if strides is None:
        factors = len(there) if factors is None else integer(factors, "factors", "strides")
        if not 0 <= factors <= len(there):
            raise ValueError(
                f"factors must lie between 0 and {len(there)} for {count} blocks of {block}; got {factors}."
            )
        return there[:factors]
    if factors is not None:
        raise ValueError(f"factors must not be given beside strides; got factors={factors} and strides={strides}.")
    chosen = integers(strides, "strides").tolist()
    if not set(chosen) <= set(there):
        raise ValueError(f"strides must be among {there} for {count} blocks of {block}, radix {radix}; got {chosen}.")
    return chosen

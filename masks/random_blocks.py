"""Random block patterns: a few blocks drawn for each block of queries, and what other random patterns draw with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparseflash.blockmask import BlockMask
from sparseflash.building import arrays_of
from sparseflash.checks import block_pair, integer, token_counts
from sparseflash.tiles import pack

Integers = npt.NDArray[np.int64]


def random_blocks(
    q_len: int, count: int, *, heads: int = 1, causal: bool = False, seed: int = 0, block: int = 128
) -> BlockMask:
    """Every block sees itself and `count` others, drawn at random without replacement, for each head anew.

    Score (q, k) with `i = q // block`, `j = k // block` is live iff

        bidirectional:  i == j  or  j in R(i),   R(i) drawn from all blocks but i
        causal:         (i == j and k <= q)  or  j in R(i),   R(i) drawn from the blocks before i

    Where there are fewer than `count` others, all are seen: the causal form is dense in its first `count + 1` blocks.
    The seed decides: the same numbers give the same mask on every machine.

    Source: the random part of BigBird (Zaheer et al., 2020, section 2) and of DeepSpeed's Variable pattern, whose draw
    may return the block itself, or one of the window, or of the future, `attention="unidirectional"` or not.

    `q_len` and `block` in tokens, `count` in blocks; with `heads` above 1 the mask is for that many query heads.
    Raises ValueError if `count` or `seed` is negative or `heads` not positive.

        8 blocks, count 2, seed 0     causal
        X . X . . . X .               \\ . . . . . . .
        . X . . X . X .               X \\ . . . . . .
        . . X . X X . .               X X \\ . . . . .
        . X . X . . . X               X X . \\ . . . .
        . X . X X . . .               X X . . \\ . . .
        X . . . X X . .               X . X . . \\ . .
        X . . . . . X X               . X . . X . \\ .
        X . . . . X . X               . X . . X . . \\

    >>> random_blocks(16_384, 3)
    BlockMask(16384 x 16384, blocks of 128, 512 tiles: 512 full + 0 partial, density 3.12 %)
    >>> random_blocks(16_384, 3, heads=4).shape
    (1, 4, 16384, 16384)
    """
    q_len, block, blocks = block_count(q_len, block)
    count = at_least(count, 0, "count", "blocks")
    heads = at_least(heads, 1, "heads", "heads")
    draw = generator(seed)
    i = np.arange(blocks)
    layouts = []
    for _ in range(heads):
        others = i if causal else np.full(blocks, blocks - 1)
        rows, picks = subsets(draw, others, count)
        cols = picks if causal else picks + (picks >= i[rows])
        layouts.append((np.concatenate([i, rows]), np.concatenate([i, cols])))
    return from_layouts(q_len, layouts, causal=causal, block=block)


def block_count(q_len: Any, block: Any) -> tuple[int, int, int]:
    """`(q_len, block, blocks)` of a pattern whose blocks are square."""
    if not isinstance(block, int):
        raise TypeError(f"block must be an int (the pattern's blocks are square); got {block!r}.")
    block, _ = block_pair(block)
    q_len, _ = token_counts(q_len, q_len)
    return q_len, block, -(-q_len // block)


def at_least(value: Any, least: int, name: str, unit: str) -> int:
    """An integer argument with a lower bound."""
    number = integer(value, name, unit)
    if number < least:
        raise ValueError(f"{name} must be at least {least}; got {number}.")
    return number


def generator(seed: Any) -> np.random.Generator:
    """PCG64, of which the patterns use integer draws and shuffles only: no rounding, so no machine differs."""
    return np.random.Generator(np.random.PCG64(at_least(seed, 0, "seed", "a generator")))


def subsets(draw: np.random.Generator, sizes: Integers, count: int) -> tuple[Integers, Integers]:
    """For each row r `min(count, sizes[r])` distinct numbers below `sizes[r]`: `(rows, picks)`, any subset as likely.

    Floyd's algorithm on all rows at once: time goes with what is drawn, not with what there is to draw from.
    """
    count = min(count, int(sizes.max(initial=0)))
    picks = np.full((len(sizes), count), -1, dtype=np.int64)
    for step in range(count):
        # The last `count` numbers of each row take turns; those of short rows that do not exist are left out.
        newest = sizes - count + step
        pick = draw.integers(0, np.maximum(newest, 0), endpoint=True)
        pick = np.where((picks[:, :step] == pick[:, None]).any(1), newest, pick)
        picks[:, step] = np.where(newest >= 0, pick, -1)
    rows, steps = np.nonzero(picks >= 0)
    return rows, picks[rows, steps]


def from_layouts(q_len: int, layouts: list[tuple[Integers, Integers]], *, causal: bool, block: int) -> BlockMask:
    """The mask of full tiles `(rows, cols)` for each head; a tile may be listed twice. `causal` drops the tiles above
    the diagonal and the scores above it in those on it."""
    blocks = -(-q_len // block)
    words = pack(torch.ones(1, block, block, dtype=torch.bool).tril())
    parts = []
    for rows, cols in layouts:
        tile = np.unique(rows * blocks + cols)
        i, j = torch.from_numpy(tile // blocks), torch.from_numpy(tile % blocks)
        if causal:
            i, j = i[j <= i], j[j <= i]
        kind = (i == j).long() if causal else torch.zeros_like(i)
        parts.append((i, j, kind, words))
    return BlockMask(q_len, q_len, block, block, *arrays_of(q_len, q_len, block, block, parts, 1, len(parts)))

"""Random blocks: every block of queries sees a few blocks of keys drawn at random."""

from __future__ import annotations

import numpy as np

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import flag
from sparseflash.masks.tiling.arguments import at_least, head_count, square_blocks
from sparseflash.masks.tiling.draws import generator, subsets
from sparseflash.masks.tiling.listing import of_blocks
from sparseflash.masks.tiling.signatures import pattern


@pattern
def random_blocks(
    q_len: int, *, count: int, heads: int = 1, causal: bool = False, seed: int = 0, block: int = 128
) -> BlockMask:
    """Every block sees itself and `count` others, drawn at random without replacement and separately for each head.

    >>> random_blocks(16_384, count=3)
    BlockMask(16384 x 16384, blocks of 128, 512 tiles: 512 full + 0 partial, density 3.12 %)

    Score (q, k) with `i = q // block`, `j = k // block` is live iff

        bidirectional:  i == j  or  j in R(i),   R(i) drawn from all blocks but i
        causal:         (i == j and k <= q)  or  j in R(i),   R(i) drawn from the blocks before i

    If there are fewer than `count` others, all are seen: the causal form is dense in its first `count + 1` blocks.

    Source: the random part of BigBird (Zaheer et al., 2020, section 2) and of DeepSpeed's Variable pattern, which may
    also draw the block itself, a block of the window or, even with `attention="unidirectional"`, a later block.

    Args:
        q_len: tokens.
        count: blocks besides the block itself.
        causal: no query sees a key after it.
        heads: above 1, the mask has this number of query heads.
        seed: the same seed gives the same mask on every machine.
        block: tokens per side of a tile.

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

    >>> random_blocks(16_384, count=3, heads=4).shape
    (1, 4, 16384, 16384)
    """
    q_len, block, blocks = square_blocks(q_len, block, "random")
    count = at_least(0, count, "count", "blocks")
    heads = head_count(heads)
    draw = generator(seed)
    i = np.arange(blocks)
    layouts = []
    for _ in range(heads):
        others = i if flag(causal, "causal") else np.full(blocks, blocks - 1)
        rows, picks = subsets(draw, others, count)
        cols = picks if causal else picks + (picks >= i[rows])
        layouts.append((np.concatenate([i, rows]), np.concatenate([i, cols])))
    return of_blocks(layouts, q_len, causal=causal, block=block)

"""Expander graphs: every block sees its neighbours on a few random cycles through all blocks."""

from __future__ import annotations

import numpy as np

from sparseflash.blockmask import BlockMask
from sparseflash.masks.tiling.arguments import at_least, head_count, square_blocks
from sparseflash.masks.tiling.draws import generator
from sparseflash.masks.tiling.listing import of_blocks
from sparseflash.masks.tiling.signatures import pattern


@pattern
def expander(q_len: int, *, degree: int, heads: int = 1, seed: int = 0, block: int = 128) -> BlockMask:
    """A random regular graph of blocks, made of `degree / 2` random Hamiltonian cycles, drawn separately for each head.

    >>> expander(16_384, degree=6)
    BlockMask(16384 x 16384, blocks of 128, 886 tiles: 886 full + 0 partial, density 5.41 %)

    Score (q, k) with `i = q // block`, `j = k // block` is live iff

        i == j  or  i and j are neighbours on one of the cycles

    The mask is symmetric, and connected for any degree of 2 or more. A block sees `degree` others, fewer where two
    cycles share an edge (two edges in expectation for each pair of cycles) and in a sequence of fewer blocks. With high
    probability it is an expander: the second largest eigenvalue of its adjacency matrix comes close to
    `2 * sqrt(degree - 1)`, the least that a regular graph can have (Friedman, 2008), and about
    `log(blocks) / log(degree - 1)` layers connect all blocks. The spectral gap is not computed.

    Source: Exphormer (Shirzad et al., 2023), section 3.1, over the nodes of a graph. Its code counts `degree` by cycles
    (half of the degree here), and draws again until the spectral gap is within 0.1 of the bound above; this function
    draws once.

    Args:
        q_len: tokens.
        degree: blocks, an even number.
        heads: above 1, the mask has this number of query heads.
        seed: the same seed gives the same mask on every machine.
        block: tokens per side of a tile.

    Raises ValueError if `degree` is odd or negative, `seed` negative or `heads` not positive.

        8 blocks, degree 2, seed 0
        X X . . . X . .
        X X . . . . . X
        . . X . X . . X
        . . . X X . X .
        . . X X X . . .
        X . . . . X X .
        . . . X . X X .
        . X X . . . . X
    """
    q_len, block, blocks = square_blocks(q_len, block, "expander")
    links = at_least(0, degree, "degree", "blocks")
    heads = head_count(heads)
    if degree % 2:
        raise ValueError(f"degree must be even (each cycle gives a block two neighbours); got {degree}.")
    draw = generator(seed)
    layouts = []
    for _ in range(heads):
        rows, cols = [np.arange(blocks)], [np.arange(blocks)]
        # Stops once the graph is complete, because further cycles would change nothing.
        missing = ~np.eye(blocks, dtype=bool) if links >= blocks else None
        for _ in range(links // 2):
            if missing is not None and not missing.any():
                break
            cycle = draw.permutation(blocks)
            following = np.roll(cycle, -1)
            rows += [cycle, following]
            cols += [following, cycle]
            if missing is not None:
                missing[cycle, following] = missing[following, cycle] = False
        layouts.append((np.concatenate(rows), np.concatenate(cols)))
    return of_blocks(layouts, q_len, causal=False, block=block)

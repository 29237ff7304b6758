"""Hierarchical attention: near blocks in full, and one block for each of the ever larger cells farther away."""

from __future__ import annotations

import torch

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import integer
from sparseflash.masks.tiling.arguments import square_blocks
from sparseflash.masks.tiling.listing import of_blocks
from sparseflash.masks.tiling.signatures import pattern


@pattern
def hierarchical(q_len: int, *, levels: int | None = None, causal: bool = False, block: int = 128) -> BlockMask:
    """The H-matrix partition of the score matrix, in which every far cell is represented by its last block.

    >>> hierarchical(16_384)
    BlockMask(16384 x 16384, blocks of 128, 2308 tiles: 2308 full + 0 partial, density 14.1 %)

    Cell a of level m holds the 2^m blocks from `a * 2^m` on. Block j, with `i = q // block` and `j = k // block`, lies
    in the far field of level m of block i iff

        |(i >> m) - (j >> m)| >= 2  and  |(i >> m+1) - (j >> m+1)| <= 1

    (the cells are apart, their parents are not), which holds for exactly one m if `|i - j| >= 2`: the near field and
    the far fields tile the matrix, each pair once. Score (q, k) is live iff

        |i - j| <= 1   or   j is in the far field of a level m < levels and is the last block of its cell
        and, if `causal`, k <= q

    If the end of the sequence cuts a cell, the last block of the sequence represents it. A block sees at most 3 blocks
    near by and 3 of each level, so `O(log nb)`; `levels` is the number of the lowest levels that are kept, all by
    default.

    Source: the partition of H-Transformer-1D (Zhu & Soricut, 2021, section 4) and Hackbusch's H-matrices; the far field
    of a level is the interaction list of the fast multipole method. H-Transformer-1D averages the keys and values of a
    far cell, which a mask cannot express; here the last block represents the cell. Over several layers it can collect
    information from the cell, also in the causal form, where only this block sees the whole cell.

    Args:
        q_len: tokens.
        levels: the number of the lowest levels that are kept; by default all.
        causal: no query sees a key after it.
        block: tokens per side of a tile.

    Raises ValueError if `levels` is negative or exceeds the number of levels.

        8 blocks             causal
        X X X X . X . X      \\ . . . . . . .
        X X X X . X . X      X \\ . . . . . .
        X X X X X X . X      X X \\ . . . . .
        X X X X X X . X      X X X \\ . . . .
        . X X X X X X X      . X X X \\ . . .
        . X X X X X X X      . X X X X \\ . .
        . X . X X X X X      . X . X X X \\ .
        . X . X X X X X      . X . X X X X \\

    >>> hierarchical(16_384, levels=0).density < 0.03
    True
    """
    q_len, block, count = square_blocks(q_len, block, "hierarchical")
    most = max((count - 1).bit_length() - 1, 0)
    levels = most if levels is None else integer(levels, "levels", "levels")
    if not 0 <= levels <= most:
        raise ValueError(f"levels must lie between 0 and {most} for {count} blocks of {block}; got {levels}.")
    i = torch.arange(count, device="cpu")
    rows, cols = [], []
    for step in (-1, 0, 1):
        exists = (i + step >= 0) & (i + step < count)
        rows.append(i[exists])
        cols.append(i[exists] + step)
    for level in range(levels):
        cell = i >> level
        for step in (-3, -2, 2, 3):
            other = cell + step
            exists = (((cell >> 1) - (other >> 1)).abs() <= 1) & (other >= 0) & (other << level < count)
            rows.append(i[exists])
            cols.append((((other[exists] + 1) << level) - 1).clamp(max=count - 1))
    return of_blocks([(torch.cat(rows), torch.cat(cols))], q_len, causal=causal, block=block)

"""BigBird: a window, global blocks and random blocks; the published pattern, and DeepSpeed's variant."""

from __future__ import annotations

import numpy as np

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import flag
from sparseflash.masks.tiling.arguments import at_least, head_count, square_blocks
from sparseflash.masks.tiling.draws import Integers, generator, subsets
from sparseflash.masks.tiling.listing import of_blocks
from sparseflash.masks.tiling.signatures import pattern


@pattern
def bigbird(
    q_len: int, *, random_blocks: int | None = None, heads: int = 1, seed: int = 0, block: int = 128
) -> BlockMask:
    """BigBird's block pattern: first and last block global, a window of three blocks, `random_blocks` random ones.

    >>> bigbird(4096, block=64)
    BlockMask(4096 x 4096, blocks of 64, 622 tiles: 622 full + 0 partial, density 15.2 %)

    Score (q, k) with `i = q // block`, `j = k // block` and `nb` blocks is live iff

        i in {0, nb - 1}  or  j in {0, nb - 1}  or  |i - j| <= 1  or  j in R(i)

    where R(i) are `random_blocks` distinct blocks, neither global nor in the window of i, drawn for each block and
    head. Block 1 never draws block nb - 2, nor the reverse, so that every block draws from nb - 5.

    Source: BigBird (Zaheer et al., 2020), appendix D, and its code (google-research/bigbird, core/attention.py,
    `get_single_block_row_attention`; 3 random blocks of 64 tokens). Here every allowed block is equally likely;
    BigBird's code draws from the first 1024 tokens at lengths 1024, 3072 and 4096, and at other lengths from the first
    `2 * random_blocks + 5` blocks. DeepSpeed's variant is `deepspeed_bigbird`.

    Args:
        q_len: tokens.
        random_blocks: random blocks of a block row; by default 3, or nb - 5 if that is smaller (at least 0).
        heads: above 1, the mask has this number of query heads.
        seed: the same seed gives the same mask on every machine.
        block: tokens per side of a tile.

    With up to 4 blocks, attention is full without random blocks. Raises ValueError if `random_blocks` is negative or
    exceeds nb - 5 (0 for fewer blocks), `seed` is negative or `heads` not positive.

        9 blocks, 1 random block, seed 0
        X X X X X X X X X
        X X X . . . X . X
        X X X X . . X . X
        X . X X X . X . X
        X . X X X X . . X
        X . X . X X X . X
        X X . . . X X X X
        X . X . . . X X X
        X X X X X X X X X
    """
    q_len, block, blocks = square_blocks(q_len, block, "BigBird")
    most = max(blocks - 5, 0)
    random_blocks = min(3, most) if random_blocks is None else at_least(0, random_blocks, "random_blocks", "blocks")
    if random_blocks > most:
        raise ValueError(
            f"random_blocks must not exceed {most} (blocks outside window and global ones) for {blocks} blocks of "
            f"{block}; got {random_blocks}. Leave it out, or choose a smaller block."
        )
    heads = head_count(heads)
    draw = generator(seed)
    i = np.arange(blocks)
    inner = i[1:-1]
    # Inner rows may draw the blocks from `first` on, without the window: the same number for every row.
    first = np.where(inner == blocks - 2, 2, 1)
    window = np.maximum(inner - 1, first)
    wide = np.where((inner == 1) | (inner == blocks - 2), 2, 3)
    layouts = []
    for _ in range(heads):
        rows, picks = subsets(draw, np.full(len(inner), most), random_blocks)
        cols = first[rows] + picks
        cols += np.where(cols >= window[rows], wide[rows], 0)
        layouts.append(_with_window_and_global(blocks, inner[rows], cols, reach=1, ends=(i[:1], i[-1:])))
    return of_blocks(layouts, q_len, causal=False, block=block)


@pattern
def deepspeed_bigbird(
    q_len: int, *, random_blocks: int = 1, window_blocks: int | None = None, global_blocks: int = 1, heads: int = 1,
    causal: bool = False, seed: int = 0, block: int = 128,
) -> BlockMask:  # fmt: skip
    """DeepSpeed's `BigBirdSparsityConfig`: a window, the first blocks global, random blocks that may fall anywhere.

    >>> deepspeed_bigbird(4096, block=64)
    BlockMask(4096 x 4096, blocks of 64, 372 tiles: 372 full + 0 partial, density 9.08 %)

    Score (q, k) with `i = q // block`, `j = k // block` is live iff

        |i - j| <= window_blocks // 2  or  i < global_blocks  or  j < global_blocks  or  j in R(i)

    and, if causal, also `k <= q`. R(i) are `random_blocks` distinct blocks, drawn from all blocks, or from the blocks
    up to i if causal. Unlike in BigBird as published (`bigbird`) the last block is not global, random blocks may lie in
    the window or be global, and the window and the number of global blocks are parameters.

    Differences from DeepSpeed: its `attention="unidirectional"` is causal in blocks only; this mask is causal to the
    token. It fails if a block row has fewer than `random_blocks` blocks to draw from; here the row takes all of them.
    It needs lengths that are multiples of the block. `heads=H` is its `different_layout_per_head`.

    Source: DeepSpeed, ops/sparse_attention/sparsity_config.py (0.12 to 0.16). The arguments are its
    `num_random_blocks`, `num_sliding_window_blocks` and `num_global_blocks`, all in blocks; its block is 16.

    Args:
        q_len: tokens.
        random_blocks, window_blocks, global_blocks: blocks; `window_blocks` is by default 3, or the number of blocks if
            that is smaller.
        causal: no query sees a key after it.
        heads: above 1, the mask has this number of query heads.
        seed: the same seed gives the same mask on every machine.
        block: tokens per side of a tile.

    Raises ValueError if a number of blocks is negative or exceeds the blocks of the sequence, `seed` is negative or
    `heads` not positive.

        8 blocks, 1 random block, seed 0     causal
        X X X X X X X X                      \\ . . . . . . .
        X X X . . X . .                      X \\ . . . . . .
        X X X X X . . .                      X X \\ . . . . .
        X . X X X . . .                      X . X \\ . . . .
        X . X X X X . .                      X X . X \\ . . .
        X . . . X X X .                      X X . . X \\ . .
        X . . . . X X X                      X . . . . X \\ .
        X . . . . . X X                      X . . . . . X \\
    """
    q_len, block, blocks = square_blocks(q_len, block, "BigBird")
    if window_blocks is None:
        window_blocks = min(3, blocks)
    given = {"random_blocks": random_blocks, "window_blocks": window_blocks, "global_blocks": global_blocks}
    for name, value in given.items():
        given[name] = at_least(0, value, name, "blocks")
        if given[name] > blocks:
            raise ValueError(
                f"{name} must not exceed the {blocks} blocks of {block} tokens; got {value}. Pass fewer, or choose a "
                "smaller block."
            )
    random_blocks, window_blocks, global_blocks = given.values()
    heads = head_count(heads)
    causal, draw = flag(causal, "causal"), generator(seed)
    i = np.arange(blocks)
    layouts = []
    for _ in range(heads):
        rows, cols = subsets(draw, i + 1 if causal else np.full(blocks, blocks), random_blocks)
        layouts.append(_with_window_and_global(blocks, rows, cols, window_blocks // 2, ends=(i[:global_blocks],)))
    return of_blocks(layouts, q_len, causal=causal, block=block)


def _with_window_and_global(
    blocks: int, rows: Integers, cols: Integers, reach: int, ends: tuple[Integers, ...]
) -> tuple[Integers, Integers]:
    i = np.arange(blocks)
    all_rows, all_cols = [rows], [cols]
    for step in range(-reach, reach + 1):
        inside = i[(i + step >= 0) & (i + step < blocks)]
        all_rows.append(inside)
        all_cols.append(inside + step)
    for chosen in ends:
        all_rows += [np.repeat(chosen, blocks), np.tile(i, len(chosen))]
        all_cols += [np.tile(i, len(chosen)), np.repeat(chosen, blocks)]
    return np.concatenate(all_rows), np.concatenate(all_cols)

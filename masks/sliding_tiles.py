"""Sliding tile attention: a window that moves over the tiles of a grid instead of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, Integers
from sparseflash.masks.tiling.grid import grid_shape, per_axis
from sparseflash.masks.tiling.ranges import Range, within_ranges
from sparseflash.masks.tiling.signatures import pattern


@pattern
def sliding_tiles(
    shape: Sequence[int],
    *,
    window: int | Sequence[int],
    tile: int | Sequence[int],
    order: Integers | None = None,
    block: Block = 128,
) -> BlockMask:
    """Every token of a grid sees whole tiles around its own tile: a window of `window` tokens on each axis that moves
    in steps of `tile`.

    >>> from sparseflash.masks import order
    >>> video, tile = (16, 32, 32), (4, 4, 8)
    >>> sliding_tiles(video, window=(12, 12, 24), tile=tile, order=order.tiles(video, tile))
    BlockMask(16384 x 16384, blocks of 128, 3456 tiles: 3456 full + 0 partial, density 21.1 %)

    A *tile* here is a box of `tile` tokens of the grid, not a tile of the mask. On each axis let n = side / tile and w
    = window / tile, and for the coordinates q and k of two tokens i = q // tile and j = k // tile. Score (q, k) is live
    iff on every axis

        c - w // 2 <= j <= c + (w - 1) // 2    with    c = min(max(i, w // 2), n - 1 - (w - 1) // 2)

    so the window moves inwards at an edge and is never cropped. It is `neighborhood` on the grid of tiles. With
    `order=order.tiles(shape, tile)` and tiles of `block` tokens every live tile of the mask is full, the purpose of the
    pattern.

    Source: Fast Video Generation with Sliding Tile Attention (Zhang et al., 2025), section 3. attention-gym's
    `generate_sta_mask_mod_3d` is the same rule, in tile order, with text tokens after the grid: see `with_text`.
    FastVideo's kernel counts windows in tiles, only odd numbers of them; here windows count tokens, as in the
    paper.

    Args:
        shape: side lengths in tokens, as (height, width) or (frames, height, width).
        window, tile: tokens, one value or one for each axis.
        order: token t of the mask is token `order[t]` of the grid in row-major order.
        block: tokens per side of a tile.

    Raises ValueError if `tile` does not divide `window` and the side, or `window` exceeds the side.

        5 tiles, window of 3
        X X X . .
        X X X . .
        . X X X .
        . . X X X
        . . X X X
    """
    sides = grid_shape(shape)
    sizes = per_axis(tile, sides, "tile", "tokens")
    windows = per_axis(window, sides, "window", "tokens")
    ranges = []
    for side, size, wide in zip(sides, sizes, windows):
        if side % size or wide % size:
            raise ValueError(
                f"tile must divide the side and the window; got {size} for {side} and {wide}, in tokens. A window of n "
                "tiles has n * tile tokens."
            )
        if wide > side:
            raise ValueError(f"window must not exceed the side; got {wide} and {side}.")
        most = side // size - wide // size
        first = (torch.arange(side, device="cpu") // size - wide // size // 2).clamp(0, most) * size
        ranges.append(Range(first, first + wide - 1))
    return within_ranges(sides, ranges, order=order, block=block)

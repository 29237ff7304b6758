"""Swin attention: a grid cut into windows with dense attention within each, and the same with shifted cuts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, Integers
from sparseflash.masks.tiling.grid import grid_shape, per_axis
from sparseflash.masks.tiling.ranges import Range, within_ranges
from sparseflash.masks.tiling.signatures import pattern


@pattern
def swin(
    shape: Sequence[int],
    *,
    window: int | Sequence[int],
    shift: int | Sequence[int] = 0,
    order: Integers | None = None,
    block: Block = 128,
) -> BlockMask:
    """Tokens of a grid see the tokens of their own window; each axis is cut at `shift` and every `window` tokens from
    there.

    >>> from sparseflash.masks import order
    >>> swin((64, 64), window=8, order=order.tiles((64, 64), 8), block=64)
    BlockMask(4096 x 4096, blocks of 64, 64 tiles: 64 full + 0 partial, density 1.56 %)

    Score (q, k) is live iff on every axis, with the coordinates q and k there,

        (q - shift) // window == (k - shift) // window          (rounded down, so the first window has shift tokens)

    Swin computes the same by rolling the image by -shift, attending in windows, and masking the pairs that only the
    roll brought into one window. Here nothing is rolled. Swin alternates layers of shift 0 and window // 2.

    Where `window` does not divide a side (less the shift) the last windows are smaller; Swin pads these images, and its
    padding takes part in the softmax. If a window is as large as the grid, pass `shift=0`, as Swin's configuration
    does.

    Source: Swin Transformer (Liu et al., 2021), section 3.2; for video, Video Swin (Liu et al., 2022). xformers'
    `swin_attention_pattern` is the same for windows that divide the sides.

    Args:
        shape: side lengths in tokens, as (height, width) or (frames, height, width).
        window, shift: tokens, one value or one for each axis.
        order: token t of the mask is token `order[t]` of the grid in row-major order; with `order.tiles(shape, window)`
            and no shift the mask is block-diagonal.
        block: tokens per side of a tile.

    Raises ValueError if `shift` is not between 0 and `window - 1`.

        8 tokens, window 4      shift 2
        X X X X . . . .         X X . . . . . .
        X X X X . . . .         X X . . . . . .
        X X X X . . . .         . . X X X X . .
        X X X X . . . .         . . X X X X . .
        . . . . X X X X         . . X X X X . .
        . . . . X X X X         . . X X X X . .
        . . . . X X X X         . . . . . . X X
        . . . . X X X X         . . . . . . X X

    >>> swin((64, 64), window=8, shift=4, order=order.tiles((64, 64), 8), block=64)
    BlockMask(4096 x 4096, blocks of 64, 484 tiles: 0 full + 484 partial (9 distinct), density 1.37 %)
    """
    sides = grid_shape(shape)
    windows = per_axis(window, sides, "window", "tokens")
    shifts = per_axis(shift, sides, "shift", "tokens", least=0)
    for size, by in zip(windows, shifts):
        if by >= size:
            raise ValueError(f"shift must lie between 0 and window - 1; got {by} for a window of {size}.")
    ranges = []
    for side, size, by in zip(sides, windows, shifts):
        start = torch.div(torch.arange(side, device="cpu") - by, size, rounding_mode="floor") * size + by
        ranges.append(Range(start.clamp(min=0), (start + size - 1).clamp(max=side - 1)))
    return within_ranges(sides, ranges, order=order, block=block)

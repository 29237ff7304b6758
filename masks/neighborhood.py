"""Neighbourhood attention: every token of a grid sees a window of tokens around it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, Integers
from sparseflash.masks.tiling.grid import grid_shape, per_axis
from sparseflash.masks.tiling.ranges import Range, within_ranges
from sparseflash.masks.tiling.signatures import pattern


@pattern
def neighborhood(
    shape: Sequence[int],
    *,
    window: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    causal: bool | Sequence[bool] = False,
    edges: str = "shift",
    order: Integers | None = None,
    block: Block = 128,
) -> BlockMask:
    """Every token of a grid (an image, a video, any number of axes) sees the `window` tokens nearest to it on each
    axis.

    >>> neighborhood((128, 128), window=13)
    BlockMask(16384 x 16384, blocks of 128, 1664 tiles: 0 full + 1664 partial (1 distinct), density 1.03 %)

    A query at x sees a key iff on every axis the key lies in the query's window there. On an axis of n tokens with
    dilation 1, with L = window // 2 keys before the leader c and R = (window - 1) // 2 after it:

        c = min(x // stride * stride + stride // 2, n - 1)
        edges="shift":   s <= k < s + window  with  s = min(max(c - L, 0), n - window)
        edges="crop":    c - L <= k <= c + R
        causal:          max(c' - window + 1, 0) <= k <= x  with  c' = min(x // stride * stride + stride - 1, n - 1)

    With `"shift"`, NATTEN's rule, the window moves inwards at an edge, so every query sees `window` keys on each axis;
    with `"crop"` the part past the edge is lost. The `stride` queries of a group share the window of their leader;
    `stride=window` gives blocked attention. With dilation d a query sees the keys whose position on the axis has the
    same remainder modulo d, by the rule above on x // d.

    Source: Neighborhood Attention (Hassani et al., 2023), dilated (Hassani and Shi, 2022), with stride and causal axes
    (Hassani et al., 2025). The rule equals NATTEN's reference kernel (csrc/include/natten/cuda/reference/mask.hpp).
    xformers' `local_nd_pattern` is cropped, with a ball instead of a box; attention-gym's `generate_natten` has this
    rule on square images with odd windows.

    Args:
        shape: side lengths of the grid in tokens, as (height, width) or (frames, height, width).
        window, stride: tokens of one remainder, one value or one for each axis.
        dilation: tokens, one value or one for each axis.
        causal: a bool, or one for each axis.
        edges: "shift" or "crop"; see above.
        order: token t of the mask is token `order[t]` of the grid in row-major order (`sparseflash.masks.order`); in
            the order of tiles the mask has far fewer live tiles.
        block: tokens per side of a tile.

    Raises ValueError if `stride` exceeds `window`, or with `edges="shift"` if `window * dilation` exceeds the side.

        an image of 1 x 6, window 3
        shift          crop           causal         stride 2       dilation 2, crop
        X X X . . .    X X . . . .    X . . . . .    X X X . . .    X . X . . .
        X X X . . .    X X X . . .    X X . . . .    X X X . . .    . X . X . .
        . X X X . .    . X X X . .    X X X . . .    . . X X X .    X . X . X .
        . . X X X .    . . X X X .    . X X X . .    . . X X X .    . X . X . X
        . . . X X X    . . . X X X    . . X X X .    . . . X X X    . . X . X .
        . . . X X X    . . . . X X    . . . X X X    . . . X X X    . . . X . X

    >>> neighborhood((6,), window=3, block=16).to_dense()[0, 0, 0].int().tolist()
    [1, 1, 1, 0, 0, 0]
    """
    sides = grid_shape(shape)
    windows = per_axis(window, sides, "window", "keys")
    steps = per_axis(stride, sides, "stride", "tokens")
    dilations = per_axis(dilation, sides, "dilation", "tokens")
    causals = tuple(causal) if isinstance(causal, Sequence) else (causal,) * len(sides)
    if len(causals) != len(sides) or not all(isinstance(one, bool) for one in causals):
        raise ValueError(f"causal must be a bool, or one for each of the {len(sides)} axes; got {causal!r}.")
    if edges not in ("shift", "crop"):
        raise ValueError(f'edges must be "shift" or "crop"; got {edges!r}.')
    for side, size, step, gap in zip(sides, windows, steps, dilations):
        if step > size:
            raise ValueError(f"stride must not exceed window; got {step} and {size}.")
        if edges == "shift" and size * gap > side:
            raise ValueError(
                f'window * dilation must not exceed the side with edges="shift"; got {size} * {gap} and {side}. '
                f'Use edges="crop", or a smaller window.'
            )
    ranges = [
        _range(side, size, step, min(gap, side), only_past, edges == "shift")
        for side, size, step, gap, only_past in zip(sides, windows, steps, dilations, causals)
    ]
    return within_ranges(sides, ranges, order=order, block=block)


def _range(side: int, window: int, stride: int, dilation: int, causal: bool, shift: bool) -> Range:
    place = torch.arange(side, device="cpu")
    residue, x = place % dilation, place // dilation
    n = (side - 1 - residue) // dilation + 1
    if causal:
        leader = torch.minimum(x // stride * stride + stride - 1, n - 1)
        first, last = (leader - window + 1).clamp(min=0), x
    else:
        leader = torch.minimum(x // stride * stride + stride // 2, n - 1)
        first, last = leader - window // 2, leader + (window - 1) // 2
        if shift:
            first = torch.minimum(first.clamp(min=0), n - window)
            last = first + window - 1
        else:
            first, last = first.clamp(min=0), torch.minimum(last, n - 1)
    return Range(residue + first * dilation, residue + last * dilation, dilation)

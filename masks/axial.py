"""Axial attention: every token of a grid sees the lines through it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, Integers, block_pair
from sparseflash.blockmask.patterns import TILES_AT_ONCE
from sparseflash.masks.tiling.grid import block_shapes, checked_order, coordinates, cut, grid_shape, strides
from sparseflash.masks.tiling.kinds import by_kind
from sparseflash.masks.tiling.listing import incidence, sharing
from sparseflash.masks.tiling.signatures import pattern


@pattern
def axial(shape: Sequence[int], *, order: Integers | None = None, block: Block = 128) -> BlockMask:
    """Every token of a grid sees its own row and its own column: the tokens that differ from it on one axis at most.

    >>> axial((64, 64))
    BlockMask(4096 x 4096, blocks of 128, 1024 tiles: 0 full + 1024 partial (2 distinct), density 3.1 %)

    Score (q, k) is live iff the coordinates of q and k

        differ on at most one axis

    so a token sees `sum(shape) - axes + 1` keys, itself included. On an image, two layers connect every pair of tokens.

    Source: xformers' `axial_nd_pattern`, in one softmax. Axial attention as published (Ho et al., 2019; Axial-DeepLab,
    Wang et al., 2020) alternates the axes between layers or heads, or adds their outputs; each axis alone is `swin`
    with a window of one line, as `swin((height, width), window=(1, width))` for the rows.

    Args:
        shape: side lengths in tokens, as (height, width) or (frames, height, width).
        order: token t of the mask is token `order[t]` of the grid in row-major order.
        block: tokens per side of a tile.

    In row-major order a column crosses every line, so the number of live tiles grows as N^1.5; an order in compact
    blocks has several times fewer.

        3 x 3
        X X X X . . X . .
        X X X . X . . X .
        X X X . . X . . X
        X . . X X X X . .
        . X . X X X . X .
        . . X X X X . . X
        X . . X . . X X X
        . X . . X . X X X
        . . X . . X X X X

    >>> from sparseflash.masks import order
    >>> axial((64, 64), order=order.tiles((64, 64), (8, 16)))
    BlockMask(4096 x 4096, blocks of 128, 352 tiles: 0 full + 352 partial (3 distinct), density 3.1 %)
    """
    block_q, block_k = block_pair(block)
    sides = grid_shape(shape)
    count = math.prod(sides)
    places = coordinates(sides, checked_order(order, count))
    query_shapes, query_shape, query_corners = block_shapes(places, block_q)
    key_shapes, key_shape, key_corners = block_shapes(places, block_k)
    lines = _lines(places, sides)
    of_queries, of_keys = (incidence(cut(lines, b).flatten(1), len(sides) * count) for b in (block_q, block_k))
    rows, cols = sharing(of_queries, of_keys)
    # The distance of two blocks on an axis matters only if they share a coordinate there.
    (first_q, last_q), (first_k, last_k) = (cut(places, b).aminmax(dim=1) for b in (block_q, block_k))
    apart = 3 * torch.tensor(sides, dtype=torch.int32, device="cpu")
    offset = [torch.empty_like(rows) for _ in sides]
    ends = [x.T.contiguous() for x in (first_q, last_k, first_k, last_q, key_corners, query_corners)]
    for i, j, *at in zip(*(x.split(TILES_AT_ONCE) for x in (rows, cols, *offset)), strict=True):
        for axis, found in enumerate(at):
            low_q, high_k, low_k, high_q, key, query = (
                x[axis].index_select(0, of) for x, of in zip(ends, (i, j, j, i, j, i), strict=True)
            )
            torch.where((low_q <= high_k) & (low_k <= high_q), key - query, apart[axis], out=found)
    codes = [shape.to(torch.int32).index_select(0, of) for shape, of in ((query_shape, rows), (key_shape, cols))]

    def live(some: Tensor) -> Tensor:
        queries = query_shapes.index_select(0, codes[0][some])
        keys = key_shapes.index_select(0, codes[1][some])
        keys = keys + torch.stack([x[some] for x in offset], 1)[:, None]
        # Coordinates of one axis side by side, because comparing every second number is slower.
        queries, keys = (x.movedim(-1, 0).contiguous() for x in (queries, keys))
        equal = queries[0, :, :, None] == keys[0, :, None, :]
        near = torch.ones_like(equal)
        for axis in range(1, len(sides)):
            same = queries[axis, :, :, None] == keys[axis, :, None, :]
            near = near & same | equal
            equal = equal & same
        return near

    return by_kind(live, rows, cols, [*codes, *offset], count, block=(block_q, block_k))


def _lines(places: Tensor, shape: tuple[int, ...]) -> Tensor:
    """int64 `[N, axes]`: the lines through each token. A line is named by its axis and its first token."""
    steps = torch.tensor(strides(shape), device="cpu")
    token = (places * steps).sum(1, keepdim=True)
    return token - places * steps + torch.arange(len(shape), device="cpu") * len(places)

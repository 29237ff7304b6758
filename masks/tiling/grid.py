"""Grids of tokens, for patterns over images and video: shapes, coordinates of tokens, blocks of equal shape.

A grid `(height, width)` or `(frames, height, width)`, or of any number of axes, holds its tokens in row-major order,
the last axis fastest, or in a given order (`sparseflash.masks.order`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparseflash.blockmask import bitmask
from sparseflash.blockmask.arguments import Integers, integer, integer_tensor, token_counts
from sparseflash.masks.tiling.arguments import FAR


def grid_shape(shape: Any) -> tuple[int, ...]:
    """The side lengths of a grid as plain integers, in tokens."""
    if isinstance(shape, str) or not isinstance(shape, Sequence) or len(shape) == 0:
        raise TypeError(f"shape must be a tuple of side lengths, as (height, width); got {shape!r}.")
    sides = tuple(integer(side, "each side of shape", "tokens") for side in shape)
    if min(sides) < 1:
        raise ValueError(f"shape must have sides of at least 1 token; got {sides}.")
    token_counts(math.prod(sides), 1)
    return sides


def per_axis(value: Any, shape: tuple[int, ...], name: str, unit: str, least: int = 1) -> tuple[int, ...]:
    """One integer for each axis of the grid, from one for all of them or one for each."""
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,) * len(shape)
    if len(values) != len(shape):
        raise ValueError(f"{name} must be an integer, or one for each of the {len(shape)} axes; got {value!r}.")
    values = tuple(integer(one, name, unit) for one in values)
    if min(values) < least:
        raise ValueError(f"{name} must be at least {least} on every axis; got {value!r}.")
    return tuple(min(one, FAR) for one in values)


def checked_order(order: Integers | None, count: int) -> Tensor | None:
    """An order of the tokens, a tensor, array or list, in int64 on the CPU; None is row-major."""
    if order is None:
        return None
    checked = integer_tensor(order, "order", torch.device("cpu")).cpu()
    if checked.shape != (count,):
        raise ValueError(f"order must have shape [{count}], one entry a token; got {list(checked.shape)}.")
    seen = torch.zeros(count, dtype=torch.bool, device="cpu")
    if bool(((checked >= 0) & (checked < count)).all()):
        seen[checked] = True
    if not bool(seen.all()):
        raise ValueError(f"order must hold each of 0..{count - 1} once.")
    return checked


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """For each axis, the distance in row-major order of two neighbours on it."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def coordinates(shape: tuple[int, ...], order: Tensor | None = None) -> Tensor:
    """int32 `[N, axes]`: the place of each token on the grid.

    >>> coordinates((2, 3)).tolist()
    [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    """
    sides = [torch.arange(side, dtype=torch.int32, device="cpu") for side in shape]
    places = torch.stack(torch.meshgrid(*sides, indexing="ij"), -1).reshape(-1, len(shape))
    return places if order is None else places[order]


def cut(values: Tensor, block: int) -> Tensor:
    """`[N, ...]` in blocks, `[M, block, ...]`; a ragged last block is filled up with copies of its last token."""
    missing = -len(values) % block
    if missing:
        values = torch.cat([values, values[-1:].expand(missing, *values.shape[1:])])
    return values.reshape(-1, block, *values.shape[1:])


def block_shapes(places: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """`(shapes, which, corners)`: blocks that are translates of one another share a shape.

    `places` int32 `[N, axes]` -> the distinct shapes int32 `[S, block, axes]`, the shape of each block int64 `[M]`, and
    its first token int32 `[M, axes]`, with `shapes[which] + corners[:, None] == cut(places, block)`.
    """
    blocks = cut(places, block)
    corners = blocks[:, 0]
    shapes, which = bitmask.deduplicate((blocks - corners[:, None]).contiguous())
    return shapes, which, corners

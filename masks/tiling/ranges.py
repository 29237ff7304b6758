"""Masks over a grid where a query sees, on every axis, a range of key coordinates: windows of every kind.

No work is done twice: blocks of tokens that are translates of one another, and whose windows are too, see the same
places and hold the same bits. If an image is ordered by tiles, nearly all blocks are translates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import Block, Integers, block_pair
from sparseflash.blockmask.build import SCORES_AT_ONCE
from sparseflash.blockmask.unique import number_combinations
from sparseflash.masks.tiling.grid import block_shapes, checked_order, coordinates, cut, strides
from sparseflash.masks.tiling.kinds import by_kind

_BOXES_AT_ONCE = 1 << 22  # boxes listed at a time: about 100 MB of temporaries
_ENDS_AT_ONCE = 1 << 20  # ends of windows cut at a time: about 50 MB of temporaries


class Range(NamedTuple):
    """The keys that each coordinate x of an axis sees: `first[x], first[x] + step, ..., last[x]`, at least one.

    `first`, `last`: int `[side]`, coordinates of the axis; `last - first` is a multiple of `step`.
    """

    first: Tensor
    last: Tensor
    step: int = 1


def within_ranges(
    shape: tuple[int, ...], ranges: Sequence[Range], *, order: Integers | None = None, block: Block = 128
) -> BlockMask:
    """Query q sees key k iff on every axis the coordinate of k is in the range of q's coordinate. One
    `Range` an axis.
    """
    block_q, block_k = block_pair(block)
    count = math.prod(shape)
    order = checked_order(order, count)
    places = coordinates(shape, order)
    key_shapes, key_shape, key_corners = block_shapes(places, block_k)
    sees = torch.stack(
        [torch.stack([r.first, r.last], -1).to(torch.int32)[places[:, axis]] for axis, r in enumerate(ranges)], 1
    )
    query_corners = cut(places, block_q)[:, 0]
    relative = cut(sees, block_q) - query_corners[:, None, :, None]
    windows, window = bitmask.deduplicate(relative.flatten(2))
    windows = windows.unflatten(2, (len(shape), 2))
    steps = [r.step for r in ranges]
    rows, cols = _tiles_seen(shape, windows, window, query_corners, steps, order, block_k)
    offset = key_corners[cols] - query_corners[rows]
    # Tiles hold the same bits if their keys have one shape and, on each axis, the same part of it is seen.
    codes = [key_shape[cols]]
    of_axes: list[tuple[Tensor, Tensor]] = []
    for axis, step in enumerate(steps):
        window_of, keys_of = windows[:, :, axis], key_shapes[:, :, axis]
        codes.append(_parts_seen(window_of, window[rows], keys_of, codes[0], offset[:, axis], step))
        number, kinds = number_combinations([codes[0], codes[-1]])
        one = number.new_zeros(kinds).scatter_(0, number, torch.arange(len(number), device="cpu"))
        seen = [
            bitmask.pack(
                _inside(window_of[window[rows[some]]], keys_of[codes[0][some]] + offset[some, axis, None], step)
            )
            for some in one.split(max(1, SCORES_AT_ONCE // (block_q * block_k)))
        ]
        of_axes.append((number, torch.cat(seen)))

    def words(some: Tensor) -> Tensor:
        number, seen = of_axes[0]
        made = seen.index_select(0, number[some])
        for number, seen in of_axes[1:]:
            made &= seen.index_select(0, number[some])
        return made

    return by_kind(words, rows, cols, codes, count, block=(block_q, block_k))


def _parts_seen(windows: Tensor, window: Tensor, keys: Tensor, key_shape: Tensor, offset: Tensor, step: int) -> Tensor:
    """A number for each tile, int64 `[E]`; equal numbers see the same part of equal key shapes, on one axis.

    `windows` int32 `[W, block_q, 2]`, from the first query; `keys` int32 `[S, block_k]`, from the first key, which is
    `offset` int32 `[E]` from the first query.
    """
    profiles, profile = bitmask.deduplicate(windows.contiguous())
    lowest, highest = keys.aminmax(dim=1)
    number, count = number_combinations([profile[window], lowest[key_shape], highest[key_shape], offset])
    one = number.new_zeros(count).scatter_(0, number, torch.arange(len(number), device="cpu"))
    parts, found, known = [], [], 0
    for some in one.split(max(1, _ENDS_AT_ONCE // windows[0].numel())):
        low, high = (x[key_shape[some], None] for x in (lowest, highest))
        first, last = (profiles[profile[window[some]]] - offset[some, None, None]).unbind(2)
        first = first + (low - first + step - 1).clamp(min=0).div(step, rounding_mode="floor") * step
        steps = (torch.minimum(last, high) - first).div(step, rounding_mode="floor").clamp(min=-1)
        distinct, which = bitmask.deduplicate(torch.stack([first.masked_fill(steps < 0, 0), steps], 2))
        parts.append(distinct)
        found.append(which + known)
        known += len(distinct)
    return bitmask.deduplicate(torch.cat(parts))[1][torch.cat(found)][number]


def _inside(window: Tensor, keys: Tensor, step: int) -> Tensor:
    """Bool `[E, block_q, block_k]` of int32 windows `[E, block_q, 2]` and coordinates of keys `[E, block_k]`."""
    first, last = window.unsqueeze(2).unbind(3)
    inside = (keys[:, None] >= first) & (keys[:, None] <= last)
    if step > 1:
        inside &= (keys[:, None] - first) % step == 0
    return inside


def _tiles_seen(
    shape: tuple[int, ...], windows: Tensor, window: Tensor, corners: Tensor, steps: list[int], order: Tensor | None,
    block_k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The tiles with a live score, once each, in row-major order."""
    col_blocks = -(-math.prod(shape) // block_k)
    block_of = torch.arange(math.prod(shape), device="cpu") // block_k
    if order is not None:
        block_of = torch.empty_like(order).scatter_(0, order, block_of)
    # Instead of single places, boxes of places that belong to one key block are listed.
    block_of = block_of.view(shape)
    box = [_box_side(block_of, axis) for axis in range(len(shape))]
    block_of = block_of[tuple(slice(None, None, side) for side in box)]
    jumps = torch.tensor(strides(tuple(block_of.shape)), device="cpu")
    sides = torch.tensor(box, dtype=torch.int32, device="cpu")
    inside = corners % sides
    kind, kinds = number_combinations([window, *inside.unbind(1)])
    one = torch.zeros(kinds, dtype=torch.int64, device="cpu").scatter_(0, kind, torch.arange(len(kind), device="cpu"))
    start, boxes = _boxes_seen(windows[window[one]] + inside[one, None, :, None], steps, sides, jumps)
    base = (corners // sides * jumps).sum(1)
    block_of, counts = block_of.reshape(-1), start.diff()[kind]
    found = []
    for rows in _in_portions(counts):
        many = counts[rows]
        row = torch.repeat_interleave(rows, many)
        within = torch.arange(len(row), device="cpu") - torch.repeat_interleave(many.cumsum(0) - many, many)
        key = row * col_blocks + block_of[base[row] + boxes[start[kind[row]] + within]]
        found.append(torch.unique_consecutive(torch.unique_consecutive(key).sort().values))
    tile = torch.cat(found)
    return tile // col_blocks, tile % col_blocks


def _box_side(block_of: Tensor, axis: int) -> int:
    """The largest power of two such that aligned pieces of this length, along this axis, lie in one key block each."""
    along, side = block_of.movedim(axis, -1), 1
    while side < along.shape[-1]:
        whole = along[..., : along.shape[-1] // (2 * side) * (2 * side)]
        if not torch.equal(whole[..., :: 2 * side], whole[..., side :: 2 * side]):
            break
        rest = along[..., whole.shape[-1] :]
        if rest.shape[-1] > side and not torch.equal(rest[..., 0], rest[..., side]):
            break
        side *= 2
    return side


def _in_portions(counts: Tensor) -> Iterator[Tensor]:
    portion = (counts.cumsum(0) - counts) // _BOXES_AT_ONCE
    _, sizes = torch.unique_consecutive(portion, return_counts=True)
    yield from torch.arange(len(counts), device="cpu").split(sizes.tolist())


def _boxes_seen(windows: Tensor, steps: list[int], sides: Tensor, jumps: Tensor) -> tuple[Tensor, Tensor]:
    """`(start, boxes)`: windows w see the boxes `boxes[start[w] : start[w + 1]]`.

    `windows` int32 `[W, block_q, axes, 2]`, in places from the box of the block's corner; the boxes are distances from
    that box in row-major order, where a step on each axis is `jumps`.
    """
    axes = len(steps)
    # A window whose steps leave out no box along an axis sees all boxes from its first place to its last, so boxes are
    # counted there instead of places.
    whole = torch.tensor(steps, device="cpu") <= sides
    unit = torch.where(whole, sides, 1)
    windows = torch.div(windows, unit[:, None], rounding_mode="floor")
    steps = [1 if one else step for one, step in zip(whole.tolist(), steps, strict=True)]
    lowest = windows[..., 0].amin(1)  # [W, axes], from the corner
    # Room for one more step, which the differences below may fill; a multiple of the step.
    extent = [
        -(-int((windows[:, :, axis, 1].amax(1) - lowest[:, axis]).max() + 1 + step) // step) * step
        for axis, step in enumerate(steps)
    ]
    to_place = strides(tuple(extent))
    counts, boxes = [], []
    for some in torch.arange(len(windows), device="cpu").split(max(1, _BOXES_AT_ONCE // math.prod(extent))):
        # +1 where a window starts on an axis and -1 one step past its end, for all combinations of starts and ends;
        # summed along each axis in turn, that counts the windows over each place.
        covered = torch.zeros(len(some), math.prod(extent), dtype=torch.int32, device="cpu")
        first = (windows[some, :, :, 0] - lowest[some, None]).long()
        past = (windows[some, :, :, 1] - lowest[some, None]).long() + torch.tensor(steps, device="cpu")
        for corner in range(1 << axes):
            ends = [corner >> axis & 1 for axis in range(axes)]
            at = sum((past if end else first)[:, :, axis] * to_place[axis] for axis, end in enumerate(ends))
            assert isinstance(at, Tensor)
            covered.scatter_add_(1, at, torch.full_like(at, (-1) ** sum(ends), dtype=torch.int32))
        covered = covered.view(len(some), *extent)
        for axis, step in enumerate(steps):
            split = covered.unflatten(axis + 1, (extent[axis] // step, step))
            covered = split.cumsum(axis + 1, dtype=torch.int32).flatten(axis + 1, axis + 2)
        which, *place = (covered > 0).nonzero(as_tuple=True)
        box = (
            torch.div(torch.stack(place, 1) + lowest[some[which]], sides // unit, rounding_mode="floor") * jumps
        ).sum(1)
        least, span = int(box.min()), int(box.max() - box.min()) + 1
        seen = torch.unique_consecutive((which * span + box - least).sort().values)
        counts.append(torch.bincount(seen // span, minlength=len(some)))
        boxes.append(seen % span + least)
    start = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), torch.cat(counts).cumsum(0)])
    return start, torch.cat(boxes)

"""The order in which programs start, longest first: the rule, in PyTorch's operations, and functions of kernels that
find the place of an item in this order.

A kernel sorts by counting: lengths that count as equal share a bin, and every program counts the items of all bins,
among all items and among those before its own. So it knows where each of its own items goes, and the kernel that writes
the items needs no other that sorts them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 64  # items that a program places at a time; it compares all pairs of them
# Programs that place items; with more items each places more. Each of them counts all items: more programs than SMs
# would count in turns.
_PROGRAMS = 128
_COUNTED = tl.constexpr(2048)  # items that a program counts at a time
WARPS = 8

# With few programs, at most about three times the resident ones, even small differences in length delay the end.
_FEW = 1024


def fraction_bits(items: int) -> int:
    """How many bits of a length's fraction, as a floating-point number, decide the order of `items` items.

    >>> fraction_bits(1024), fraction_bits(1025)
    (4, 1)
    """
    return 4 if items <= _FEW else 1


def start_order(lengths: Tensor) -> Tensor:
    """The order in which programs of these `lengths [W]`, in tiles, start: int64 `[W]`.

    >>> start_order(torch.tensor([3, 9, 8])).tolist()
    [1, 2, 0]

    Sorting over all heads keeps the GPU busy to the end if a few rows are much longer than the rest. But programs that
    run at the same time should share keys in the L2 cache, and an exact sort mixes all heads. So lengths that agree in
    their highest bits count as equal, and equal lengths keep their order, head by head: an octave has 2 different
    lengths, and 16 if there are few programs. In a simulation of 132 to 396 programs at a time, with the rows and
    columns of chosen blocks, documents, causal and random masks, this costs on average 0.2 % over an exact sort, and
    0.04 % if there are few.
    """
    highest = lengths.clamp(min=1).float().view(torch.int32) >> (23 - fraction_bits(len(lengths)))
    return torch.sort(highest, stable=True, descending=True).indices


class Order(NamedTuple):
    """What a kernel that places items needs."""

    items: int
    programs: int
    fraction: int  # see `fraction_bits`
    arguments: tuple[int, ...]


def order_of(pattern: Tensor, shape: tuple[int, int, int], length: int, tile: int, held: int) -> Order:
    """The order of the items of `pattern [B, Hq]`, in tiles of `tile` tokens of `length`, with lists of `held` tokens.

    shape: `(B, H, group)`.
    """
    batch, heads, group = shape
    tiles = -(-length // tile)
    items = batch * heads * tiles
    share = max(1, -(-items // (_PROGRAMS * AT_ONCE))) * AT_ONCE
    of = (*pattern.stride(), heads, group, tiles, -(-length // held), tile, held)
    fraction = fraction_bits(items)
    return Order(items, -(-items // share), fraction, (items, share, *of, fraction, AT_ONCE))


@triton.jit
def row_of(number, member, pattern_ptr, of):
    """The rows of the lists for some items and one member of their group.

    of: the strides of the pattern; H, without the group; the group; tiles of a head, rows of a pattern, tokens of a
    tile and tokens of a row.
    """
    batch_stride, head_stride, heads, group, tiles, rows, tile, held = of
    of_head = number // tiles
    batch, head = of_head // heads, of_head % heads * group + member
    pattern = tl.load(pattern_ptr + batch * batch_stride + head * head_stride)
    return pattern.to(tl.int64) * rows + number % tiles * tile // held


@triton.jit
def size_of(number, pattern_ptr, count_ptr, of):
    """The tiles of all lists of each item."""
    size = number * 0
    for member in range(of[3]):
        size += tl.load(count_ptr + row_of(number, member, pattern_ptr, of))
    return size


@triton.jit
def some_items(first, stop, AT_ONCE: tl.constexpr):
    """The numbers of the next items from `first` on, and which are before `stop`; the others are 0."""
    number = first + tl.arange(0, AT_ONCE)
    return tl.where(number < stop, number, 0), number < stop


@triton.jit
def _bin_of(size, FRACTION: tl.constexpr):
    """The bin of each item, as `start_order` tells lengths apart; the longest are in the first bin."""
    bits = tl.maximum(size, 1).to(tl.float32).to(tl.int32, bitcast=True)
    return (32 << FRACTION) - 1 - ((bits - 0x3F800000) >> (23 - FRACTION))  # 0x3F800000: the bits of 1.0


@triton.jit
def first_places(begin, items, pattern_ptr, count_ptr, of, FRACTION: tl.constexpr):
    """The place in the order of the first item of every bin, among those from number `begin` on."""
    counts, before = tl.zeros([32 << FRACTION], tl.int32), tl.zeros([32 << FRACTION], tl.int32)
    for first in range(0, items, _COUNTED):
        number, here = some_items(first, items, _COUNTED)
        of_bin = _bin_of(size_of(number, pattern_ptr, count_ptr, of), FRACTION)
        counts += tl.histogram(of_bin, 32 << FRACTION, mask=here)
        before += tl.histogram(of_bin, 32 << FRACTION, mask=here & (number < begin))
    return tl.cumsum(counts, 0) - counts + before


@triton.jit
def places(number, next_place, pattern_ptr, count_ptr, of, FRACTION: tl.constexpr, AT_ONCE: tl.constexpr):
    """The places of `some_items` in the order, and the next places of all bins."""
    of_bin, lane = _bin_of(size_of(number, pattern_ptr, count_ptr, of), FRACTION), tl.arange(0, AT_ONCE)
    # Items past the end are last, and after them no places are asked for: they may be counted.
    earlier = (of_bin[None, :] == of_bin[:, None]) & (lane[None, :] < lane[:, None])
    place = tl.gather(next_place, of_bin, 0) + tl.sum(earlier.to(tl.int32), 1)
    return place, next_place + tl.histogram(of_bin, 32 << FRACTION)

"""Kernels that cut the items of the backward into parts and assign parts to programs, by the rules of
`cuts.parts_of` and `backward_plan.assigned`.

From `cut_kernel` on, every part of a cut item is an item; the parts of an item have consecutive numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparseflash.backends.triton.persistent.backward_plan import HALVES_APART, LAST_ROUNDS
from sparseflash.backends.triton.schedule.longest_first import size_of, some_items
from sparseflash.backends.triton.schedule.work_item import CUT_FIRST_PART, CUT_ITEM, CUT_NUMBER, CUT_PARTS, CUT_UNUSED

# A program is one number, from the high bits on: its load, 31 bits; its number, as many bits as PADDED needs; its
# number of items, COUNT_BITS. So sorting finds the program with the least load, the first among equals. There may be
# 512 programs; a Hopper GPU runs at most 288 at a time.
COUNT_BITS = tl.constexpr(23)
_MASK = tl.constexpr((1 << 23) - 1)
_LARGEST = tl.constexpr(1 << 31)  # larger than the cost of any item
_NUMBER_SHIFT = tl.constexpr(23 + 31)  # of a program's number, where it stands before load and items
_NEVER = tl.constexpr((1 << 63) - 1)  # sorts last


@triton.jit(
    do_not_specialize=["batch_stride", "head_stride", "kv_heads", "columns", "group", "items"],
    do_not_specialize_on_alignment=["pattern_ptr", "count_ptr"],
)
def size_kernel(
    pattern_ptr, count_ptr,  # int32 [B, Hq], [P * columns]
    size_ptr,  # int32 [items]
    batch_stride, head_stride, kv_heads, columns, group, items,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Writes the number of entries of every item."""
    of = batch_stride, head_stride, kv_heads, group, columns, columns, 1, 1
    item, here = some_items(tl.program_id(0) * AT_ONCE, items, AT_ONCE)
    tl.store(size_ptr + item, size_of(item, pattern_ptr, count_ptr, of), mask=here)


@triton.jit(
    do_not_specialize=[
        "items", "programs", "far", "worth", "worth_alike", "parts", "shortest", "room", "least",
    ],
)  # fmt: skip
def cut_kernel(
    size_ptr,  # int32 [items]
    first_ptr,  # int32 [2, items + 1]: the first part of each item; the parts of all cut items before it
    part_size_ptr,  # int32 [most_items]: the size of every part; an item that is not cut is one part
    merged_ptr,  # int32 [items, CUT_ITEM]
    total_ptr,  # int32 [8]: parts, parts of cut items, cut items; the seventh and eighth: see `_write_order`
    order_ptr, ranked_ptr,  # int32 [2, room], [room]: see `_write_order`
    items, programs, far, worth, worth_alike, parts, shortest, room, least,  # from `far` to `shortest`: see `cuts.Rule`
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Cuts items into parts, and begins to write the order in which they are assigned."""
    lane = tl.arange(0, AT_ONCE)
    total, most = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for first in range(0, items, AT_ONCE):
        size = tl.load(size_ptr + first + lane, mask=first + lane < items, other=0).to(tl.int64)
        total += tl.sum(size, 0)
        most = tl.maximum(most, tl.max(size, 0))
    mean = tl.cdiv(total + items, programs)
    longest = tl.maximum(tl.cdiv(mean, parts), shortest)
    enough = mean * tl.where(most * items > far * total, worth, worth_alike)
    made, partial, cut = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for first in range(0, items, AT_ONCE):
        item = first + lane
        here = item < items
        size = tl.load(size_ptr + item, mask=here, other=0).to(tl.int64)
        is_cut = (4 * size > enough) & (2 * size > 3 * longest)
        count = tl.where(is_cut, tl.cdiv(size, longest), here.to(tl.int64)).to(tl.int32)
        count_cut = tl.where(is_cut, count, 0)
        first_part = made + tl.cumsum(count, 0) - count
        first_cut = partial + tl.cumsum(count_cut, 0) - count_cut
        tl.store(first_ptr + item, first_part, mask=here)
        tl.store(first_ptr + (items + 1) + item, first_cut, mask=here)
        parts_here = tl.maximum(count, 1)
        for part in range(tl.max(count, 0)):
            begin, end = part * size // parts_here, (part + 1) * size // parts_here
            tl.store(part_size_ptr + first_part + part, (end - begin).to(tl.int32), mask=part < count)
        row_ptr = merged_ptr + (cut + tl.cumsum(is_cut.to(tl.int32), 0) - 1).to(tl.int64) * CUT_ITEM
        tl.store(row_ptr + CUT_NUMBER, item, mask=is_cut)
        tl.store(row_ptr + CUT_FIRST_PART, first_cut, mask=is_cut)
        tl.store(row_ptr + CUT_PARTS, count, mask=is_cut)
        tl.store(row_ptr + CUT_UNUSED, tl.zeros([AT_ONCE], tl.int32), mask=is_cut)
        made += tl.sum(count, 0)
        partial += tl.sum(count_cut, 0)
        cut += tl.sum(is_cut.to(tl.int32), 0)
    tl.store(first_ptr + items, made)
    tl.store(first_ptr + (items + 1) + items, partial)
    tl.store(total_ptr, made)
    tl.store(total_ptr + 1, partial)
    tl.store(total_ptr + 2, cut)
    tl.debug_barrier()
    _write_order(part_size_ptr, order_ptr, ranked_ptr, total_ptr, made, total, programs, room, least, AT_ONCE)


@triton.jit
def _is_long(size, items, programs, total, least):
    size = size.to(tl.int64)
    return (size * items > 2 * total) & (size * (100 * programs) >= least * total)


@triton.jit
def _write_order(
    size_ptr, order_ptr, ranked_ptr, total_ptr, items, total, programs, room, least, AT_ONCE: tl.constexpr
):  # fmt: skip
    """Writes the part of `plan.start_order` that needs no sorting: the number and the size of every item that stays in
    order. Lists the others in `ranked_ptr`, for `rank_items_kernel`: the long items, then those of the last three
    rounds. The last two numbers of `total_ptr` are how many items are long, and how many are listed.

    total: the number of entries of all items.
    """
    lane = tl.arange(0, AT_ONCE)
    long = tl.zeros([], tl.int32)
    for first in range(0, items, AT_ONCE):
        size = tl.load(size_ptr + first + lane, mask=first + lane < items, other=0)
        long += tl.sum(_is_long(size, items, programs, total, least).to(tl.int32), 0)
    first_last = tl.maximum(items - long - 3 * programs, 0)  # place among those that are not long
    before, long_before = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for first in range(0, items, AT_ONCE):
        item = first + lane
        here = item < items
        size = tl.load(size_ptr + item, mask=here, other=0)
        is_long = _is_long(size, items, programs, total, least)
        is_short = (~is_long & here).to(tl.int32)
        place = before + tl.cumsum(is_short, 0) - 1
        is_last = place >= first_last
        stays = here & ~is_long & ~is_last
        tl.store(order_ptr + long + place, item, mask=stays)
        tl.store(order_ptr + room + long + place, size, mask=stays)
        place = tl.where(is_long, long_before + tl.cumsum(is_long.to(tl.int32), 0) - 1, long + place - first_last)
        tl.store(ranked_ptr + place, item, mask=here & (is_long | is_last))
        before += tl.sum(is_short, 0)
        long_before += tl.sum(is_long.to(tl.int32), 0)
    tl.store(total_ptr + 6, long)
    tl.store(total_ptr + 7, items - first_last)


@triton.jit(do_not_specialize=["room"])
def rank_items_kernel(
    size_ptr, ranked_ptr, total_ptr,  # int32 [room], [room], [8]: see `_write_order`
    order_ptr,  # int32 [2, room]: the numbers and the sizes of all items, in `plan.start_order`
    room,
    LANES: tl.constexpr,
):  # fmt: skip
    """Writes the items of `ranked_ptr` into the order: the long items first, those of the last three rounds last, both
    by decreasing size.

    There are at most seven of these items for each program, four of them long. So each is compared with all others: its
    place follows from the number of items that come before it.
    """
    items, long, ranked = tl.load(total_ptr), tl.load(total_ptr + 6), tl.load(total_ptr + 7)
    for first in range(tl.program_id(0) * LANES, ranked, tl.num_programs(0) * LANES):
        at = first + tl.arange(0, LANES)
        item = tl.load(ranked_ptr + at, mask=at < ranked, other=0)
        size = tl.load(size_ptr + item)
        is_long = at < long
        place = tl.where(is_long, 0, items - ranked + long)
        for first_other in range(0, ranked, 16 * LANES):
            other = first_other + tl.arange(0, 16 * LANES)
            other_size = tl.load(size_ptr + tl.load(ranked_ptr + other, mask=other < ranked, other=0))[None, :]
            is_longer = (other_size > size[:, None]) | ((other_size == size[:, None]) & (other[None, :] < at[:, None]))
            is_alike = ((other < long)[None, :] == is_long[:, None]) & (other < ranked)[None, :]
            place += tl.sum((is_longer & is_alike).to(tl.int32), 1)
        tl.store(order_ptr + place, item, mask=at < ranked)
        tl.store(order_ptr + room + place, size, mask=at < ranked)


@triton.jit(do_not_specialize=["tiles", "programs", "room"])
def deal_kernel(
    order_ptr,  # int32 [2, room]: the numbers and the sizes of the items, in the order in which they are assigned
    made_ptr,  # int32 [2, tiles + 1]: the last are the numbers of all entries and of all chains
    dealt_ptr,  # int32 [3, room]: program, time, how many items the program has before
    start_ptr, first_entry_ptr,  # int32 [programs + 1]: the first item and the first entry of every program
    total_ptr,  # int32 [8]: the items, read; from the fourth to the sixth written
    tiles, programs, room,
    PADDED: tl.constexpr, PROGRAM_BITS: tl.constexpr,
):  # fmt: skip
    """Assigns every item to a program, and writes the numbers of entries, chains and times. Runs as one program."""
    SHIFT: tl.constexpr = PROGRAM_BITS + COUNT_BITS
    items = tl.load(total_ptr)
    lane = tl.arange(0, PADDED).to(tl.int64)
    entries = tl.load(made_ptr + tiles).to(tl.int64)
    total = entries + items
    state = tl.where(lane < tl.minimum(programs, items), lane << COUNT_BITS, _NEVER)
    at = tl.zeros([], tl.int32)
    item = tl.load(order_ptr + lane, mask=lane < items, other=0).to(tl.int64)
    size = tl.load(order_ptr + room + lane, mask=lane < items, other=0).to(tl.int64)
    while at < items:
        load = state >> SHIFT
        halves = tl.where(items - at > LAST_ROUNDS * programs, HALVES_APART, 1)
        is_free = ((load - tl.min(load, 0)) * 2 * items <= halves * total) & (state < _NEVER)
        free = tl.sum(is_free.to(tl.int32), 0)
        here = (lane < free) & (at + lane < items)
        # The longest first, the first among equals: 31 bits, as many as PADDED needs, and the number of the item.
        key = tl.where(here, ((_LARGEST - 1 - size) << SHIFT) | (lane << COUNT_BITS) | item, _NEVER)
        at += free
        # The items of the next round are loaded while those of this round are sorted.
        item = tl.load(order_ptr + at + lane, mask=at + lane < items, other=0).to(tl.int64)
        size = tl.load(order_ptr + room + at + lane, mask=at + lane < items, other=0).to(tl.int64)
        # Both are sorted in one call, which takes as long as sorting one. Free programs come first.
        state, key = tl.split(tl.trans(tl.sort(tl.trans(tl.join(state, key)))))
        load = state >> SHIFT
        is_given = key < _NEVER
        given, cost = key & _MASK, _LARGEST - (key >> SHIFT)
        tl.store(dealt_ptr + given, ((state >> COUNT_BITS) & (PADDED - 1)).to(tl.int32), mask=is_given)
        tl.store(dealt_ptr + room + given, load.to(tl.int32), mask=is_given)
        tl.store(dealt_ptr + 2 * room + given, (state & _MASK).to(tl.int32), mask=is_given)
        state += tl.where(is_given, (cost << SHIFT) + 1, 0)

    # Sorted by the number of the program. Programs without an item come last.
    number, load, count = (state >> COUNT_BITS) & (PADDED - 1), state >> SHIFT, state & _MASK
    state = tl.sort(tl.where(state < _NEVER, (number << _NUMBER_SHIFT) | (load << COUNT_BITS) | count, _NEVER))
    has_items = state < _NEVER
    load = tl.where(has_items, (state >> COUNT_BITS) & (_LARGEST - 1), 0)
    count = tl.where(has_items, state & _MASK, 0)
    tl.store(start_ptr + 1 + lane, tl.cumsum(count, 0).to(tl.int32), mask=lane < programs)
    tl.store(first_entry_ptr + 1 + lane, tl.cumsum(load - count, 0).to(tl.int32), mask=lane < programs)
    tl.store(start_ptr, 0)
    tl.store(first_entry_ptr, 0)
    tl.store(total_ptr + 3, entries.to(tl.int32))
    tl.store(total_ptr + 4, tl.load(made_ptr + 2 * tiles + 1))
    tl.store(total_ptr + 5, tl.max(load, 0).to(tl.int32))

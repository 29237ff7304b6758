"""Leaves out what lies past the lengths of a call from a plan of the Hopper backward, which does not know the lengths.

Of a dense mask, sequences of half the padded length leave a quarter of the tiles. Entries keep their order, but come
earlier than planned, so the additions to a tile of queries are ordered anew, by the same rule: by time, and at the same
time by the number of the program. So the kernel cannot deadlock (`hopper/backward.py`). Items stay with their programs,
which may then have unequal work. After these kernels, `timeline.rank_kernel` ranks the additions.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.persistent.backward_plan import (
    ENTRY,
    ENTRY_ROW,
    ENTRY_TILE,
    ITEM,
    ITEM_COUNT,
    ITEM_FIRST_ENTRY,
    ITEM_FIRST_KEY,
    ITEM_NUMBER,
)

AT_ONCE = tl.constexpr(128)  # entries of an item, or items of a program, that are read at a time
MOST_PROGRAMS = tl.constexpr(512)  # as in dealing.py
_FIELDS = tl.constexpr(triton.next_power_of_2(ITEM.value))


@triton.jit
def _within(item_ptr, lengths_ptr, lengths_stride, kv_heads):
    """Of an item: its first entry, the number of entries that may be left, and the number of live queries."""
    batch = tl.load(item_ptr + ITEM_NUMBER) // kv_heads
    is_past = tl.load(item_ptr + ITEM_FIRST_KEY) >= tl.load(lengths_ptr + lengths_stride + batch)
    count = tl.where(is_past, 0, tl.load(item_ptr + ITEM_COUNT))
    return tl.load(item_ptr + ITEM_FIRST_ENTRY), count, tl.load(lengths_ptr + batch)


@triton.jit
def _left(entries_ptr, first, at, count, length, row_tiles, TILE_ROWS: tl.constexpr):
    """`(addresses, tiles of queries, whether they are left)` of an item's entries from number `at` on."""
    entry = at + tl.arange(0, AT_ONCE)
    entry_ptr = entries_ptr + (first + entry) * ENTRY
    row = tl.load(entry_ptr + ENTRY_ROW, mask=entry < count, other=0)
    return entry_ptr, row, (entry < count) & (row % row_tiles * TILE_ROWS < length)


@triton.jit(
    do_not_specialize=["lengths_stride", "kv_heads", "row_tiles", "tiles"],
    do_not_specialize_on_alignment=["lengths_ptr"],
)
def count_kernel(
    plan_work_ptr, plan_entry_ptr,  # int32 [items, ITEM], [entries, ENTRY]
    lengths_ptr, lengths_stride,  # int32 [2, B], of queries and of keys
    work_ptr,  # as plan_work_ptr, written: with the numbers of entries that are left
    cursor_ptr,  # int32 [tiles], zeroed
    kv_heads, row_tiles, tiles,
    TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Counts the entries of an item that are left."""
    item, field = tl.program_id(0), tl.arange(0, _FIELDS)
    item_ptr = plan_work_ptr + item * ITEM
    first, count, length = _within(item_ptr, lengths_ptr, lengths_stride, kv_heads)
    left = tl.zeros([AT_ONCE], tl.int32)
    for at in range(0, count, AT_ONCE):
        _, _, is_left = _left(plan_entry_ptr, first, at, count, length, row_tiles, TILE_ROWS)
        left += is_left.to(tl.int32)
    numbers = tl.load(item_ptr + field, mask=field < ITEM, other=0)
    tl.store(work_ptr + item * ITEM + field, tl.where(field == ITEM_COUNT, tl.sum(left), numbers), mask=field < ITEM)
    each = tl.cdiv(tiles, tl.num_programs(0))
    stop = tl.minimum((item + 1) * each, tiles)
    for at in range(item * each, stop, AT_ONCE):
        tile = at + tl.arange(0, AT_ONCE)
        tl.store(cursor_ptr + tile, tl.zeros([AT_ONCE], tl.int32), mask=tile < stop)


@triton.jit
def time_kernel(
    start_ptr, work_ptr,  # int32 [programs + 1], [items, ITEM]
    time_ptr,  # int64 [items], written: the time of an item's first entry, times MOST_PROGRAMS, plus its program
):  # fmt: skip
    """Times the items of a program: an item takes as long as it has entries, and one more."""
    program = tl.program_id(0)
    time = tl.zeros([], tl.int64)
    begin, end = tl.load(start_ptr + program), tl.load(start_ptr + program + 1)
    for first in range(begin, end, AT_ONCE):
        item = first + tl.arange(0, AT_ONCE)
        here = item < end
        taken = here.to(tl.int64) + tl.load(work_ptr + item * ITEM + ITEM_COUNT, mask=here, other=0)
        before = time + tl.cumsum(taken, 0) - taken
        tl.store(time_ptr + item, before * MOST_PROGRAMS + program, mask=here)
        time += tl.sum(taken, 0)


@triton.jit(
    do_not_specialize=["lengths_stride", "kv_heads", "row_tiles"],
    do_not_specialize_on_alignment=["lengths_ptr", "made_ptr"],
)
def keep_kernel(
    plan_work_ptr, plan_entry_ptr, made_ptr,  # as above; int32 [tiles + 1], the first addition to each tile of queries
    lengths_ptr, lengths_stride, time_ptr,
    entry_ptr,  # as plan_entry_ptr, written from the first place of each item on, without chain and rank
    cursor_ptr, moment_ptr, added_ptr,  # int32 [tiles], zeros; int64, int32 [entries]: see `timeline.entry_kernel`
    kv_heads, row_tiles,
    TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Lists the entries that are left, and for every tile of queries the times and entries of its additions."""
    first, count, length = _within(plan_work_ptr + tl.program_id(0) * ITEM, lengths_ptr, lengths_stride, kv_heads)
    moment = tl.load(time_ptr + tl.program_id(0))
    kept = 0
    for at in range(0, count, AT_ONCE):
        old_ptr, row, is_left = _left(plan_entry_ptr, first, at, count, length, row_tiles, TILE_ROWS)
        place = kept + tl.cumsum(is_left.to(tl.int32), 0) - 1
        new_ptr = entry_ptr + (first + place) * ENTRY
        tl.store(new_ptr + ENTRY_ROW, row, mask=is_left)
        tl.store(new_ptr + ENTRY_TILE, tl.load(old_ptr + ENTRY_TILE, mask=is_left, other=0), mask=is_left)
        addition = tl.load(made_ptr + row, mask=is_left, other=0) + tl.atomic_add(cursor_ptr + row, 1, mask=is_left)
        tl.store(moment_ptr + addition, moment + place.to(tl.int64) * MOST_PROGRAMS, mask=is_left)
        tl.store(added_ptr + addition, first + place, mask=is_left)
        kept += tl.sum(is_left.to(tl.int32), 0)

"""Kernels that order the entries of the backward's items, and the additions to every tile of queries.

They sort nothing: lists are short, so the place of an entry is the number of entries before it. The timeline has a cell
for every time and program, with the tile of queries that the program adds to then.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparseflash.backends.triton.persistent.backward_plan import (
    ENTRY,
    ENTRY_CHAIN,
    ENTRY_RANK,
    ENTRY_ROW,
    ENTRY_TILE,
    ITEM,
    ITEM_COUNT,
    ITEM_FIRST_ENTRY,
    ITEM_FIRST_KEY,
    ITEM_NUMBER,
    ITEM_PART,
)

AT_ONCE = tl.constexpr(32)  # entries of a list that are compared with as many others
_LANES = tl.constexpr(32)  # programs that are compared with all at a time
_MEMBERS = tl.constexpr(16)  # heads of a group that are read at a time
_ORDERS = tl.constexpr(4)


@triton.jit(
    do_not_specialize=[
        "batch_stride", "head_stride", "heads", "rows", "tiles", "programs", "shortest", "quarters", "few",
    ],
    do_not_specialize_on_alignment=["pattern_ptr", "counted_ptr"],
)  # fmt: skip
def chain_kernel(
    pattern_ptr, counted_ptr, made_ptr,  # int32 [B, Hq], [P * rows], [2, tiles + 1]
    cursor_ptr, meeting_ptr,  # int32 [tiles], [orders, heads of all batch elements], cleared
    batch_stride, head_stride, heads, rows, tiles, programs, shortest, quarters, few,
):  # fmt: skip
    """Writes the numbers of additions and of chains of every tile of queries of a head. Element 0 of both arrays is 0,
    so their running sums are the first addition and the first chain of each tile.
    """
    number = tl.program_id(0)
    for order in tl.static_range(_ORDERS):
        tl.store(meeting_ptr + order * tl.num_programs(0) + number, 0)
    pattern = tl.load(pattern_ptr + (number // heads).to(tl.int64) * batch_stride + number % heads * head_stride)
    counted_ptr += pattern.to(tl.int64) * rows
    total, live = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for first in range(0, rows, AT_ONCE):
        place = first + tl.arange(0, AT_ONCE)
        count = tl.load(counted_ptr + place, mask=place < rows, other=0)
        total += tl.sum(count.to(tl.int64), 0)
        live += tl.sum((count > 0).to(tl.int64), 0)
    longest = tl.cdiv(total * quarters, tl.maximum(4 * live, 1))
    longest = tl.maximum(tl.where(total > few * live * live, tl.cdiv(total, programs), longest), shortest)
    target_ptr = made_ptr + number.to(tl.int64) * rows + 1
    for first in range(0, rows, AT_ONCE):
        place = first + tl.arange(0, AT_ONCE)
        count = tl.load(counted_ptr + place, mask=place < rows, other=0)
        tl.store(target_ptr + place, count, mask=place < rows)
        tl.store(target_ptr + (tiles + 1) + place, tl.cdiv(count, longest).to(tl.int32), mask=place < rows)
        tl.store(cursor_ptr + number.to(tl.int64) * rows + place, tl.zeros([AT_ONCE], tl.int32), mask=place < rows)
    if number == 0:
        tl.store(made_ptr, 0)
        tl.store(made_ptr + tiles + 1, 0)


@triton.jit
def _key(row, column, rows, columns, band, stride, ORDER: tl.constexpr):
    """The sort key of the entries of a column, in one of four orders in which its list may be walked.

    Two columns meet where both reach the same row at the same time. In the first three orders, columns that start
    together and have all rows never meet:

    - From the diagonal on, wrapping around at the end, in bands of rows and in strides within a band. Meetings are
      spread over time, and the rows that all programs read and add to at one time fit in the L2 cache.
    - From the diagonal on, wrapping around at the end. Columns that have all rows from some row on never meet, either.
    - By `row ^ column`. Columns of a butterfly never meet, either.
    - From the last row back. Columns of a causal mask that start one after the other never meet.
    """
    if ORDER == 2:
        return row ^ column
    elif ORDER == 3:
        return rows - 1 - row
    else:
        shift = (row - (column.to(tl.int64) * rows // columns).to(tl.int32) + rows) % rows
        if ORDER == 1:
            return shift
        in_band = shift % band
        return shift - in_band + in_band * stride % band


@triton.jit
def _places(row, column, index_ptr, count, rows, columns, band, stride, ORDER: tl.constexpr):
    """Where these rows of tiles come in the list of a column, if the list is walked in this order."""
    key = _key(row, column, rows, columns, band, stride, ORDER)
    place = tl.zeros([AT_ONCE], tl.int32)
    for first in range(0, count, AT_ONCE):
        other = first + tl.arange(0, AT_ONCE)
        other_row = tl.load(index_ptr + other, mask=other < count, other=0)
        is_before = _key(other_row, column, rows, columns, band, stride, ORDER)[None, :] < key[:, None]
        place += tl.sum((is_before & (other < count)[None, :]).to(tl.int32), 1)
    return place


@triton.jit
def _list_of(pattern_ptr, start_ptr, count_ptr, batch_stride, head_stride, kv_heads, columns, group):
    """The list of this program, one query head of an item, as `(item, column, head, start, count, before)`. before: the
    entries of the item that come before the list.
    """
    item, member = tl.program_id(0) // group, tl.program_id(0) % group
    kv_head, column = item // columns, item % columns
    batch = kv_head // kv_heads
    first_head = kv_head % kv_heads * group
    pattern_ptr += batch.to(tl.int64) * batch_stride
    before = tl.zeros([], tl.int32)
    for first in range(0, member, _MEMBERS):
        other = first + tl.arange(0, _MEMBERS)
        pattern = tl.load(pattern_ptr + (first_head + other) * head_stride, mask=other < member, other=0)
        before += tl.sum(tl.load(count_ptr + pattern.to(tl.int64) * columns + column, mask=other < member, other=0), 0)
    number = tl.load(pattern_ptr + (first_head + member) * head_stride).to(tl.int64) * columns + column
    head = batch * (kv_heads * group) + first_head + member
    return item, column, head, tl.load(start_ptr + number), tl.load(count_ptr + number), before


@triton.jit
def _dealt(part, dealt_ptr, room):
    place_ptr = dealt_ptr + part
    return tl.load(place_ptr), tl.load(place_ptr + room), tl.load(place_ptr + 2 * room)


@triton.jit
def _part_of(place, size_ptr, first_ptr, item):
    size, first, stop = tl.load(size_ptr + item), tl.load(first_ptr + item), tl.load(first_ptr + item + 1)
    count = (stop - first).to(tl.int64)
    part = tl.minimum(((place + 1) * count - 1) // tl.maximum(size, 1), count - 1)
    return first + part.to(tl.int32), place - (part * size // count).to(tl.int32)


@triton.jit(
    do_not_specialize=[
        "batch_stride", "head_stride", "kv_heads", "columns", "group", "rows", "band", "stride", "room", "span",
        "programs",
    ],
    do_not_specialize_on_alignment=["pattern_ptr", "start_ptr", "count_ptr", "index_ptr"],
)  # fmt: skip
def timeline_kernel(
    pattern_ptr, start_ptr, count_ptr, index_ptr, size_ptr, first_ptr, dealt_ptr,
    cell_ptr,  # int32 [orders, span, programs], -1 where nothing is added
    batch_stride, head_stride, kv_heads, columns, group, rows, band, stride, room, span, programs,
):  # fmt: skip
    """Writes the tiles of queries of one list at their times, in each of the orders."""
    item, column, head, start, count, before = _list_of(
        pattern_ptr, start_ptr, count_ptr, batch_stride, head_stride, kv_heads, columns, group
    )
    index_ptr += start
    for first in range(0, count, AT_ONCE):
        entry = first + tl.arange(0, AT_ONCE)
        row = tl.load(index_ptr + entry, mask=entry < count, other=0)
        for order in tl.static_range(_ORDERS):
            place = _places(row, column, index_ptr, count, rows, columns, band, stride, order)
            part, place = _part_of(before + place, size_ptr, first_ptr, item)
            program, time, _ = _dealt(part, dealt_ptr, room)
            at = (order * span.to(tl.int64) + time + place) * programs + program
            tl.store(cell_ptr + at, head * rows + row, mask=entry < count)


@triton.jit(do_not_specialize=["rows", "heads", "span", "programs"])
def meet_kernel(cell_ptr, meeting_ptr, rows, heads, span, programs, PADDED: tl.constexpr):
    """Counts the entries that meet others at the same time, for every order and head: int32 `[orders, heads]`."""
    lane = tl.arange(0, PADDED)
    for order in range(_ORDERS):
        time_ptr = cell_ptr + (order * span.to(tl.int64) + tl.program_id(0)) * programs
        tile = tl.load(time_ptr + lane, mask=lane < programs, other=-1)
        meets = tl.zeros([PADDED], tl.int32)
        for first in range(0, programs, _LANES):
            other = first + tl.arange(0, _LANES)
            other_tile = tl.load(time_ptr + other, mask=other < programs, other=-1)
            alike = (tile[:, None] == other_tile[None, :]) & (other[None, :] < lane[:, None])
            meets += tl.sum(alike.to(tl.int32), 1)
        tl.atomic_add(meeting_ptr + order * heads + tile // rows, 1, mask=(meets > 0) & (tile >= 0))


@triton.jit(
    do_not_specialize=[
        "batch_stride", "head_stride", "kv_heads", "columns", "group", "rows", "band", "stride", "room", "items",
        "programs", "heads", "held", "tenths",
    ],
    do_not_specialize_on_alignment=[
        "pattern_ptr", "start_ptr", "count_ptr", "index_ptr", "tile_ptr", "first_ptr",
    ],
)  # fmt: skip
def entry_kernel(
    pattern_ptr, start_ptr, count_ptr, index_ptr, tile_ptr, size_ptr, first_ptr, part_size_ptr, dealt_ptr,
    program_start_ptr, program_entry_ptr,
    meeting_ptr, made_ptr,  # int32 [orders, heads], [2, tiles + 1]: the first addition of each tile of queries
    cursor_ptr, moment_ptr, added_ptr,  # int32 [tiles], zeros; int64, int32 [entries]
    work_ptr, entries_ptr,  # int32 [parts, ITEM], [entries, ENTRY]
    batch_stride, head_stride, kv_heads, columns, group, rows, band, stride, room, items, programs, heads, held, tenths,
):  # fmt: skip
    """Writes the entries of one list in the best order of its head. For every tile of queries it writes the times and
    entries of the additions, in any order. The first list of an item also writes the parts of the item.
    """
    item, column, head, start, count, before = _list_of(
        pattern_ptr, start_ptr, count_ptr, batch_stride, head_stride, kv_heads, columns, group
    )
    if tl.program_id(0) % group == 0:
        first, stop = tl.load(first_ptr + item), tl.load(first_ptr + item + 1)
        first_cut = tl.load(first_ptr + (items + 1) + item)
        for part in range(first, stop):
            program, time, nth = _dealt(part, dealt_ptr, room)
            item_ptr = work_ptr + (tl.load(program_start_ptr + program) + nth).to(tl.int64) * ITEM
            tl.store(item_ptr + ITEM_NUMBER, item // columns)
            tl.store(item_ptr + ITEM_FIRST_KEY, column * held)
            tl.store(item_ptr + ITEM_FIRST_ENTRY, tl.load(program_entry_ptr + program) + time - nth)
            tl.store(item_ptr + ITEM_COUNT, tl.load(part_size_ptr + part))
            tl.store(item_ptr + ITEM_PART, tl.where(stop - first > 1, first_cut + part - first + 1, 0))
    best, fewest = 0, tl.load(meeting_ptr + head).to(tl.int64)
    for order in tl.static_range(1, _ORDERS):
        meetings = tl.load(meeting_ptr + order * heads + head).to(tl.int64)
        is_better = meetings * 10 < fewest * tenths
        best, fewest = tl.where(is_better, order, best), tl.where(is_better, meetings, fewest)
    index_ptr += start
    for first in range(0, count, AT_ONCE):
        entry = first + tl.arange(0, AT_ONCE)
        here = entry < count
        row = tl.load(index_ptr + entry, mask=here, other=0)
        place = tl.zeros([AT_ONCE], tl.int32)
        for order in tl.static_range(_ORDERS):
            if best == order:
                place = _places(row, column, index_ptr, count, rows, columns, band, stride, order)
        part, place = _part_of(before + place, size_ptr, first_ptr, item)
        program, time, nth = _dealt(part, dealt_ptr, room)
        tile, number = head * rows + row, tl.load(program_entry_ptr + program) + time - nth + place
        entry_ptr = entries_ptr + number.to(tl.int64) * ENTRY
        tl.store(entry_ptr + ENTRY_ROW, tile, mask=here)
        tl.store(entry_ptr + ENTRY_TILE, tl.load(tile_ptr + start + entry, mask=here, other=0), mask=here)
        at = tl.load(made_ptr + tile, mask=here, other=0) + tl.atomic_add(cursor_ptr + tile, 1, mask=here)
        tl.store(moment_ptr + at, (time + place).to(tl.int64) * programs + program, mask=here)
        tl.store(added_ptr + at, number, mask=here)


@triton.jit(do_not_specialize_on_alignment=["made_ptr", "chain_ptr"])
def rank_kernel(
    made_ptr, chain_ptr, cursor_ptr,  # int32 [tiles + 1], the first addition and chain; [tiles], the additions
    moment_ptr, added_ptr, entries_ptr,
):  # fmt: skip
    """Writes the chain and the rank of every addition to one tile of queries."""
    tile = tl.program_id(0)
    first_made, chain = tl.load(made_ptr + tile), tl.load(chain_ptr + tile)
    count, chains = tl.load(cursor_ptr + tile), tl.load(chain_ptr + tile + 1) - chain
    for first in range(0, count, AT_ONCE):
        place = first + tl.arange(0, AT_ONCE)
        here = place < count
        moment = tl.load(moment_ptr + first_made + place, mask=here, other=0)
        number = tl.zeros([AT_ONCE], tl.int32)
        for other_first in range(0, count, AT_ONCE):
            other = other_first + tl.arange(0, AT_ONCE)
            is_there = other < count
            earlier = tl.load(moment_ptr + first_made + other, mask=is_there, other=0)[None, :] < moment[:, None]
            number += tl.sum((earlier & is_there[None, :]).to(tl.int32), 1)
        entry_ptr = entries_ptr + tl.load(added_ptr + first_made + place, mask=here, other=0).to(tl.int64) * ENTRY
        tl.store(entry_ptr + ENTRY_CHAIN, chain + number % chains, mask=here)
        tl.store(entry_ptr + ENTRY_RANK, number // chains, mask=here)


@triton.jit(do_not_specialize_on_alignment=["words_ptr"])
def transpose_kernel(words_ptr, by_key_ptr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Writes the bits of 32 queries of one tile with keys as rows: see `bitmask.transposed`."""
    HEIGHT: tl.constexpr = min(QUERIES, 32)
    WIDTH: tl.constexpr = min(KEYS, 32)
    ACROSS: tl.constexpr = KEYS // WIDTH
    DOWN: tl.constexpr = QUERIES // HEIGHT
    tile, part = (tl.program_id(0) // DOWN).to(tl.int64), tl.program_id(0) % DOWN
    query, across, bit = tl.arange(0, HEIGHT), tl.arange(0, ACROSS), tl.arange(0, WIDTH)
    words = tl.load(words_ptr + (tile * QUERIES + part * HEIGHT + query[:, None]) * ACROSS + across[None, :])
    bits = ((words[:, :, None] >> bit[None, None, :]) & 1) << query[:, None, None]
    key = across[:, None] * WIDTH + bit[None, :]
    tl.store(by_key_ptr + (tile * KEYS + key) * DOWN + part, tl.sum(bits, 0))

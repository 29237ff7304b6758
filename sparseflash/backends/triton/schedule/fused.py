"""Triton kernels that make tile lists and work lists, for masks that are made at every step.

`full_first`, `columns_of` and the work of a plan, written with PyTorch's operations, take some fifty kernel launches.
Here each list, over rows or columns, takes one launch, and the work takes another. The results are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.launcher import launches_of
from sparseflash.backends.triton.schedule.longest_first import WARPS, first_places, order_of, places, row_of, some_items
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.schedule.work_item import (
    ITEM,
    ITEM_COUNT,
    ITEM_FULL,
    ITEM_FULL_BLOCK,
    ITEM_NUMBER,
    ITEM_PART,
    ITEM_PARTIAL_BLOCK,
    ITEM_PARTIAL_TILE,
    ITEM_START,
)
from sparseflash.backends.triton.schedule.worklists import TileLists

AT_ONCE = 128  # entries of a row
_ROWS, _COLUMNS = 128, 8  # rows and columns that are searched at a time
# `columns_full_first` searches every row for every column; in a larger and sparser mask sorting takes less time. A
# program searches its pattern's rows one chunk after another, hence the limit on rows.
_MOST_PAIRS, _MOST_ROWS = 1 << 26, 4096


@dataclass
class Listed:
    """The lists of a `TileLists`, for kernels that the current stream runs next."""

    start: Tensor
    full: Tensor
    count: Tensor
    index: Tensor
    tile: Tensor
    tiling: Tiling


def full_first(indptr: Tensor, index: Tensor, tile: Tensor, words: Tensor, tiling: Tiling) -> TileLists:
    """`worklists.full_first` in one launch, with a program per row."""
    of = listed(indptr, index, tile, tiling)
    return TileLists(of.start, of.full, of.count, of.index, of.tile, words, tiling)


def listed(indptr: Tensor, index: Tensor, tile: Tensor, tiling: Tiling) -> Listed:
    """The lists of `full_first`."""
    rows, room, device = len(indptr) - 1, len(index) + 1, index.device
    full, count = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
    found, kinds = (torch.empty(room, dtype=torch.int32, device=device) for _ in range(2))
    _listing(device).start(
        rows, indptr, index, tile, full, count, found, kinds, room - 1, room, -(-room // rows), AT_ONCE
    )
    return Listed(indptr[:-1], full, count, found, kinds, tiling)


def can_search(patterns: int, blocks: tuple[int, int]) -> bool:
    """Whether `columns_full_first` is faster than sorting, for these numbers of patterns, block rows and columns."""
    return blocks[0] <= _MOST_ROWS and patterns * blocks[0] * blocks[1] <= _MOST_PAIRS


def columns_full_first(
    indptr: Tensor, index: Tensor, tile: Tensor, words: Tensor, blocks: tuple[int, int], tiling: Tiling
) -> TileLists:
    """`full_first` of `csr.columns_of` in one launch."""
    of = columns_listed(indptr, index, tile, blocks, tiling)
    return TileLists(of.start, of.full, of.count, of.index, of.tile, words, tiling)


def columns_listed(indptr: Tensor, index: Tensor, tile: Tensor, blocks: tuple[int, int], tiling: Tiling) -> Listed:
    """The lists of `columns_full_first`, with a program for every few columns of a pattern.

    blocks: the numbers of block rows and columns. A binary search finds how many entries of a row come before a column;
    the sum over all rows is the start of the column's list.
    """
    (rows, columns), device = blocks, index.device
    lists, room = (len(indptr) - 1) // rows * columns, len(index) + 1
    programs = lists // columns * -(-columns // _COLUMNS)
    start, full, count = torch.empty(3, lists, dtype=torch.int32, device=device).unbind()
    found, kinds = (torch.empty(room, dtype=torch.int32, device=device) for _ in range(2))
    _searching(device).start(
        programs, indptr, index, tile, start, full, count, found, kinds, rows, columns, room, -(-room // programs),
        _ROWS, _COLUMNS,
    )  # fmt: skip
    return Listed(start, full, count, found, kinds, tiling)


def work_in_start_order(
    lists: TileLists | Listed, pattern: Tensor, shape: tuple[int, int, int], length: int, tile: int
) -> Tensor:
    """The work of a plan, int32 `[W, group, ITEM]`.

    pattern: `[B, Hq]`. shape: `(B, H, group)`. The lists must be in the mask's own tiles. No item is cut.
    """
    order = order_of(pattern, shape, length, tile, lists.tiling.held)
    work = torch.empty(order.items, shape[2], ITEM.value, dtype=torch.int32, device=pattern.device)
    _writing(pattern.device, order.fraction).start(
        order.programs, pattern, lists.start, lists.full, lists.count, lists.index, lists.tile, work, *order.arguments
    )  # fmt: skip
    return work


# A mask's arrays may have any address; no load here gains from alignment to 16 bytes.
@triton.jit(
    do_not_specialize=["entries", "room", "share"],
    do_not_specialize_on_alignment=["indptr_ptr", "index_ptr", "tile_ptr", "full_ptr", "count_ptr"],
)
def list_kernel(
    indptr_ptr, index_ptr, tile_ptr,  # int32 [rows + 1], [entries] twice
    full_ptr, count_ptr, listed_ptr, kinds_ptr,  # int32 [rows] twice, [room] twice
    entries, room, share,  # room = entries + 1; share: of the room, where each program fills in the unused entries
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Lists the tiles of one row: the full ones, then the partial ones, both in the order of the row."""
    row = tl.program_id(0).to(tl.int64)
    start, stop = tl.load(indptr_ptr + row).to(tl.int64), tl.load(indptr_ptr + row + 1).to(tl.int64)
    lane = tl.arange(0, AT_ONCE)
    full = tl.zeros([], tl.int64)
    for first in range(start, stop, AT_ONCE):
        kind = tl.load(tile_ptr + first + lane, mask=first + lane < stop, other=1)
        full += tl.sum((kind <= 0).to(tl.int64), 0)
    tl.store(full_ptr + row, full.to(tl.int32))
    tl.store(count_ptr + row, (stop - start).to(tl.int32))

    full_before = tl.zeros([], tl.int64)  # in earlier chunks
    for first in range(start, stop, AT_ONCE):
        entry = first + lane
        kind = tl.load(tile_ptr + entry, mask=entry < stop, other=1)
        is_full = kind <= 0
        earlier = full_before + tl.cumsum(is_full.to(tl.int32), 0) - is_full.to(tl.int32)
        place = tl.where(is_full, start + earlier, entry + full - earlier)
        tl.store(listed_ptr + place, tl.load(index_ptr + entry, mask=entry < stop, other=0), mask=entry < stop)
        tl.store(kinds_ptr + place, kind, mask=entry < stop)
        full_before += tl.sum(is_full.to(tl.int64), 0)

    used = tl.load(indptr_ptr + tl.num_programs(0)).to(tl.int64)
    end = tl.minimum((row + 1) * share, room)
    for first in range(tl.maximum(row * share, used), end, AT_ONCE):
        unused = first + lane
        tl.store(listed_ptr + unused, tl.load(index_ptr + unused, mask=unused < entries, other=0), mask=unused < end)
        tl.store(kinds_ptr + unused, tl.load(tile_ptr + unused, mask=unused < entries, other=0), mask=unused < end)


@triton.jit
def _find(indptr_ptr, index_ptr, row, stop_row, column):
    """Binary search for columns in rows whose entries increase. Rows from `stop_row` on count as empty.

    Returns for each row and column: the index of the entry, or where it would be; the number of entries of the row
    before it; whether the entry exists.
    """
    is_row = row < stop_row
    start = tl.load(indptr_ptr + row, mask=is_row, other=0)
    stop = tl.load(indptr_ptr + row + 1, mask=is_row, other=0)
    column = column[None, :]
    low, high = start[:, None] + 0 * column, stop[:, None] + 0 * column
    left = tl.max(stop - start, 0)
    while left > 0:
        middle = low + (high - low) // 2
        is_open = low < high
        is_before = is_open & (tl.load(index_ptr + middle, mask=is_open, other=0) < column)
        low, high = tl.where(is_before, middle + 1, low), tl.where(is_before, high, middle)
        left //= 2
    found = tl.load(index_ptr + low, mask=low < stop[:, None], other=-1)
    return low, low - start[:, None], found == column


@triton.jit(
    do_not_specialize=["rows", "columns", "room", "share"],
    do_not_specialize_on_alignment=["indptr_ptr", "index_ptr", "tile_ptr", "start_ptr", "full_ptr", "count_ptr"],
)
def column_kernel(
    indptr_ptr, index_ptr, tile_ptr,  # int32 [P * rows + 1], [room - 1] twice
    start_ptr, full_ptr, count_ptr, listed_ptr, kinds_ptr,  # int32 [P * columns] thrice, [room] twice
    rows, columns, room, share,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Lists the tiles of some columns of a pattern: the full ones, then the partial ones, both by their rows."""
    program = tl.program_id(0)
    parts = tl.cdiv(columns, COLUMNS)
    first_row, column = program // parts * rows, program % parts * COLUMNS + tl.arange(0, COLUMNS)
    stop_row = first_row + rows
    start = tl.zeros([COLUMNS], tl.int32) + tl.load(indptr_ptr + first_row)
    full, count = tl.zeros([COLUMNS], tl.int32), tl.zeros([COLUMNS], tl.int32)
    for first in range(first_row, stop_row, ROWS):
        entry, before, is_there = _find(indptr_ptr, index_ptr, first + tl.arange(0, ROWS), stop_row, column)
        kind = tl.load(tile_ptr + entry, mask=is_there, other=1)
        start += tl.sum(before, 0)
        full += tl.sum((kind <= 0).to(tl.int32), 0)
        count += tl.sum(is_there.to(tl.int32), 0)
    number, is_column = program // parts * columns + column, column < columns
    tl.store(start_ptr + number, start, mask=is_column)
    tl.store(full_ptr + number, full, mask=is_column)
    tl.store(count_ptr + number, count, mask=is_column)

    partial = start + full  # where the next tile of either kind goes
    for first in range(first_row, stop_row, ROWS):
        row = first + tl.arange(0, ROWS)
        entry, _, is_there = _find(indptr_ptr, index_ptr, row, stop_row, column)
        kind = tl.load(tile_ptr + entry, mask=is_there, other=0)
        is_full = (is_there & (kind <= 0)).to(tl.int32)
        is_partial = (is_there & (kind > 0)).to(tl.int32)
        full_place, partial_place = start[None, :] + tl.cumsum(is_full, 0), partial[None, :] + tl.cumsum(is_partial, 0)
        place = tl.where(kind <= 0, full_place, partial_place) - 1
        tl.store(listed_ptr + place, (row - first_row)[:, None], mask=is_there)
        tl.store(kinds_ptr + place, kind, mask=is_there)
        start += tl.sum(is_full, 0)
        partial += tl.sum(is_partial, 0)

    used = tl.load(indptr_ptr + tl.num_programs(0) // parts * rows)
    own = program.to(tl.int64) * share
    end = tl.minimum(own + share, room)
    for first in range(tl.maximum(own, used), end, ROWS):
        unused = first + tl.arange(0, ROWS)
        tl.store(listed_ptr + unused, tl.zeros([ROWS], tl.int32), mask=unused < end)
        tl.store(kinds_ptr + unused, tl.zeros([ROWS], tl.int32), mask=unused < end)


@triton.jit(
    do_not_specialize=[
        "items", "share", "batch_stride", "head_stride", "heads", "group", "tiles", "rows", "tile", "held",
    ],
    do_not_specialize_on_alignment=["pattern_ptr", "start_ptr", "full_ptr", "count_ptr"],
)  # fmt: skip
def work_kernel(
    pattern_ptr, start_ptr, full_ptr, count_ptr, index_ptr, tile_ptr,  # int32 [B, Hq], [rows] thrice, [room] twice
    work_ptr,  # int32 [items, group, ITEM]
    items, share, batch_stride, head_stride, heads, group, tiles, rows, tile, held,  # see `longest_first.row_of`
    FRACTION: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Writes a share of the work items to their places in the order."""
    of = batch_stride, head_stride, heads, group, tiles, rows, tile, held
    begin = tl.program_id(0) * share
    next_place = first_places(begin, items, pattern_ptr, count_ptr, of, FRACTION)
    for first in range(begin, begin + share, AT_ONCE):
        number, here = some_items(first, items, AT_ONCE)
        place, next_place = places(number, next_place, pattern_ptr, count_ptr, of, FRACTION, AT_ONCE)
        for member in range(group):
            row = row_of(number, member, pattern_ptr, of)
            start, full = tl.load(start_ptr + row), tl.load(full_ptr + row)
            masked = start + full
            item_ptr = work_ptr + (place.to(tl.int64) * group + member) * ITEM
            tl.store(item_ptr + ITEM_NUMBER, number, mask=here)
            tl.store(item_ptr + ITEM_START, start, mask=here)
            tl.store(item_ptr + ITEM_FULL, full, mask=here)
            tl.store(item_ptr + ITEM_COUNT, tl.load(count_ptr + row), mask=here)
            tl.store(item_ptr + ITEM_FULL_BLOCK, tl.load(index_ptr + start), mask=here)
            tl.store(item_ptr + ITEM_PARTIAL_BLOCK, tl.load(index_ptr + masked), mask=here)
            tl.store(item_ptr + ITEM_PARTIAL_TILE, tl.load(tile_ptr + masked), mask=here)
            tl.store(item_ptr + ITEM_PART, tl.zeros([AT_ONCE], tl.int32), mask=here)


_listing = launches_of(list_kernel, num_warps=1, num_stages=1)
_searching = launches_of(column_kernel, num_warps=4, num_stages=1)
_writing = launches_of(work_kernel, num_warps=WARPS, num_stages=1)  # by the device and `fraction_bits`

"""The forward's plan for a dynamic mask, one that is made at every step.

It is made without waiting for the device: no row is cut, and the order is the portable kernels'
(`schedule/longest_first.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.launcher import launches_of
from sparseflash.backends.triton.persistent.plan import (
    ITEM,
    ITEM_BLOCK,
    ITEM_COUNT,
    ITEM_FULL,
    ITEM_NUMBER,
    ITEM_PART,
    ITEM_START,
    ITEM_TILE,
    ITEM_UNUSED,
)
from sparseflash.backends.triton.schedule.fused import Listed
from sparseflash.backends.triton.schedule.longest_first import WARPS, first_places, order_of, places, row_of, some_items
from sparseflash.backends.triton.schedule.worklists import (
    TileLists,
    Worklist,
    check_number_of_items,
    with_trailing_zero,
)


def dynamic_forward_plan(lists: TileLists, pattern: Tensor, q_len: int) -> Worklist:
    """The plan for `pattern [B, Hq]`; `lists`: over rows, in the forward's tiles."""
    return Worklist(*dynamic_work(lists, pattern, q_len), lists.words)


def dynamic_work(lists: TileLists | Listed, pattern: Tensor, q_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """The items of the plan, int32 `[W, ITEM]`, and the arrays `index` and `tile` that the items refer to.

    A row without tiles has one dead tile, number -1.
    """
    (batch, heads), device, held = pattern.shape, pattern.device, lists.tiling.held
    check_number_of_items(batch, heads, -(-q_len // held))
    order = order_of(pattern, (batch, heads, 1), q_len, held, held)
    work = torch.empty(order.items, ITEM.value, dtype=torch.int32, device=device)
    index, tile = lists.index, lists.tile
    if len(index) < 2:  # a mask without room for a tile: the kernel reads one tile ahead even then
        index, tile = with_trailing_zero(index), with_trailing_zero(tile)
    _launch(device, order.fraction).start(
        order.programs, pattern, lists.start, lists.full, lists.count, index, tile, work, *order.arguments
    )
    return work, index, tile


@triton.jit(
    do_not_specialize=[
        "items", "share", "batch_stride", "head_stride", "heads", "group", "tiles", "rows", "tile", "held",
    ],
    do_not_specialize_on_alignment=["pattern_ptr", "start_ptr", "full_ptr", "count_ptr"],
)  # fmt: skip
def items_kernel(
    pattern_ptr, start_ptr, full_ptr, count_ptr, index_ptr, tile_ptr,  # int32 [B, Hq], [rows] thrice, [room] twice
    work_ptr,  # int32 [items, ITEM]
    items, share, batch_stride, head_stride, heads, group, tiles, rows, tile, held,  # see `longest_first.row_of`
    FRACTION: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Writes a share of the items to their places in the order."""
    of = batch_stride, head_stride, heads, group, tiles, rows, tile, held
    begin = tl.program_id(0) * share
    next_place = first_places(begin, items, pattern_ptr, count_ptr, of, FRACTION)
    for first in range(begin, begin + share, AT_ONCE):
        number, here = some_items(first, items, AT_ONCE)
        place, next_place = places(number, next_place, pattern_ptr, count_ptr, of, FRACTION, AT_ONCE)
        row = row_of(number, 0, pattern_ptr, of)
        count = tl.load(count_ptr + row)
        is_empty = count == 0
        start = tl.where(is_empty, 0, tl.load(start_ptr + row))
        item_ptr = work_ptr + place.to(tl.int64) * ITEM
        tl.store(item_ptr + ITEM_NUMBER, number, mask=here)
        tl.store(item_ptr + ITEM_START, start, mask=here)
        tl.store(item_ptr + ITEM_FULL, tl.load(full_ptr + row), mask=here)
        tl.store(item_ptr + ITEM_COUNT, tl.maximum(count, 1), mask=here)
        tl.store(item_ptr + ITEM_BLOCK, tl.where(is_empty, 0, tl.load(index_ptr + start)), mask=here)
        tl.store(item_ptr + ITEM_TILE, tl.where(is_empty, -1, tl.load(tile_ptr + start)), mask=here)
        tl.store(item_ptr + ITEM_PART, tl.zeros([AT_ONCE], tl.int32), mask=here)
        tl.store(item_ptr + ITEM_UNUSED, tl.zeros([AT_ONCE], tl.int32), mask=here)


_launch = launches_of(items_kernel, num_warps=WARPS, num_stages=1)  # by the device and `fraction_bits`

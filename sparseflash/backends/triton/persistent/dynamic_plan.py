"""The forward's plan for a dynamic mask, one that is made at every step.

It is made without waiting for the device: no row is cut, and the order is the portable kernels' (`schedule/fused.py`).
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
from sparseflash.backends.triton.schedule import fused
from sparseflash.backends.triton.schedule.worklists import (
    TileLists,
    Worklist,
    check_number_of_items,
    with_trailing_zero,
)


def dynamic_forward_plan(lists: TileLists, pattern: Tensor, q_len: int) -> Worklist:
    """The plan for `pattern [B, Hq]`; `lists`: over rows, in the forward's tiles."""
    return Worklist(*dynamic_work(lists, pattern, q_len), lists.words)


def dynamic_work(lists: TileLists | fused.Listed, pattern: Tensor, q_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """The items of the plan, int32 `[W, ITEM]`, and the arrays `index` and `tile` that the items refer to.

    A row without tiles has one dead tile, number -1.
    """
    (batch, heads), device, held = pattern.shape, pattern.device, lists.tiling.held
    check_number_of_items(batch, heads, -(-q_len // held))
    order, place = fused.order_of_work(lists, pattern, (batch, heads, 1), q_len, held)
    work = torch.empty(len(order), ITEM.value, dtype=torch.int32, device=device)
    index, tile = lists.index, lists.tile
    if len(index) < 2:  # a mask without room for a tile: the kernel reads one tile ahead even then
        index, tile = with_trailing_zero(index), with_trailing_zero(tile)
    _launch(device).start(
        -(-len(order) // fused.AT_ONCE), pattern, lists.start, lists.full, lists.count, index, tile, order, work,
        *place, fused.AT_ONCE,
    )  # fmt: skip
    return work, index, tile


@triton.jit(
    do_not_specialize=["batch_stride", "head_stride", "items", "heads", "tiles", "blocks", "tile", "held"],
    do_not_specialize_on_alignment=["pattern_ptr", "start_ptr", "full_ptr", "count_ptr"],
)
def items_kernel(
    pattern_ptr, start_ptr, full_ptr, count_ptr, index_ptr, tile_ptr,  # int32 [B, Hq], [rows] thrice, [room] twice
    order_ptr, work_ptr,  # int64 [items], int32 [items, ITEM]
    batch_stride, head_stride, items, heads, tiles, blocks, tile, held,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Writes AT_ONCE items, in their order."""
    place = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    here = place < items
    number = tl.load(order_ptr + place, mask=here, other=items)
    row = fused.row_of(
        number, 0, pattern_ptr, batch_stride, head_stride, items, heads, tiles, blocks, tile, held, 1
    )  # fmt: skip
    count = tl.load(count_ptr + row)
    is_empty = count == 0
    start = tl.where(is_empty, 0, tl.load(start_ptr + row))
    item_ptr = work_ptr + place * ITEM
    tl.store(item_ptr + ITEM_NUMBER, number.to(tl.int32), mask=here)
    tl.store(item_ptr + ITEM_START, start, mask=here)
    tl.store(item_ptr + ITEM_FULL, tl.load(full_ptr + row), mask=here)
    tl.store(item_ptr + ITEM_COUNT, tl.maximum(count, 1), mask=here)
    tl.store(item_ptr + ITEM_BLOCK, tl.where(is_empty, 0, tl.load(index_ptr + start)), mask=here)
    tl.store(item_ptr + ITEM_TILE, tl.where(is_empty, -1, tl.load(tile_ptr + start)), mask=here)
    tl.store(item_ptr + ITEM_PART, tl.zeros([AT_ONCE], tl.int32), mask=here)
    tl.store(item_ptr + ITEM_UNUSED, tl.zeros([AT_ONCE], tl.int32), mask=here)


_launch = launches_of(items_kernel, num_warps=4, num_stages=1)

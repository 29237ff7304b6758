"""The forward's plan for a mask that is made at every step.

The portable kernels plan such a mask without waiting for the device (`schedule/fused.py`). Their work list serves here
as well, in other numbers, which is one launch more. No row is cut, and the order is theirs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseflash.backends.triton.hopper.plan import (
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
from sparseflash.backends.triton.launcher import Launch
from sparseflash.backends.triton.schedule import work_item
from sparseflash.backends.triton.schedule.worklists import Worklist, with_trailing_zero
from sparseflash.blockmask.cache import bounded

_AT_ONCE = 128  # items of a program

# Where the numbers of the portable kernels' items are.
LISTED = work_item.ITEM
LISTED_NUMBER = work_item.ITEM_NUMBER
LISTED_START = work_item.ITEM_START
LISTED_FULL = work_item.ITEM_FULL
LISTED_COUNT = work_item.ITEM_COUNT
LISTED_FULL_BLOCK = work_item.ITEM_FULL_BLOCK
LISTED_PARTIAL_BLOCK = work_item.ITEM_PARTIAL_BLOCK
LISTED_PARTIAL_TILE = work_item.ITEM_PARTIAL_TILE
LISTED_PART = work_item.ITEM_PART


def dynamic_forward_plan(listed: Worklist) -> Worklist:
    """The plan, with items `[W, ITEM]`, for what the portable kernels would walk over tiles of as many queries.

    A row without tiles has one of which no score is live, tile number -1.
    """
    items, device = len(listed.work), listed.work.device
    work = torch.empty(items, ITEM.value, dtype=torch.int32, device=device)
    _launch(device).start(-(-items // _AT_ONCE), listed.work, work, items, _AT_ONCE)
    index, tile = listed.index, listed.tile
    if len(index) < 2:  # of a mask without room for a tile; the kernel reads one ahead of a row without tiles, too
        index, tile = with_trailing_zero(index), with_trailing_zero(tile)
    return Worklist(work, index, tile, listed.words, listed.parts, listed.merged)


# The arguments are all that differs in what Triton specialises on: see `Launch.of_all_arguments`.
@bounded(maxsize=32)
def _launch(device: torch.device) -> Launch:
    return Launch.of_all_arguments(items_kernel, device, num_warps=4, num_stages=1)


@triton.jit(do_not_specialize=["items"])
def items_kernel(
    listed_ptr, work_ptr,  # int32 [items, LISTED], [items, ITEM]
    items,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Writes some items as the forward reads them."""
    item = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    here = item < items
    from_ptr, to_ptr = listed_ptr + item * LISTED, work_ptr + item * ITEM
    full, count = tl.load(from_ptr + LISTED_FULL, mask=here), tl.load(from_ptr + LISTED_COUNT, mask=here)
    begins_full = full > 0
    block = tl.load(from_ptr + tl.where(begins_full, LISTED_FULL_BLOCK, LISTED_PARTIAL_BLOCK), mask=here)
    tile = tl.where(begins_full, 0, tl.load(from_ptr + LISTED_PARTIAL_TILE, mask=here))
    is_empty = count == 0
    tl.store(to_ptr + ITEM_NUMBER, tl.load(from_ptr + LISTED_NUMBER, mask=here), mask=here)
    tl.store(to_ptr + ITEM_START, tl.where(is_empty, 0, tl.load(from_ptr + LISTED_START, mask=here)), mask=here)
    tl.store(to_ptr + ITEM_FULL, full, mask=here)
    tl.store(to_ptr + ITEM_COUNT, tl.maximum(count, 1), mask=here)
    tl.store(to_ptr + ITEM_BLOCK, tl.where(is_empty, 0, block), mask=here)
    tl.store(to_ptr + ITEM_TILE, tl.where(is_empty, -1, tile), mask=here)
    tl.store(to_ptr + ITEM_PART, tl.load(from_ptr + LISTED_PART, mask=here), mask=here)
    tl.store(to_ptr + ITEM_UNUSED, tl.zeros([AT_ONCE], tl.int32), mask=here)

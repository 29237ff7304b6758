"""Lists of chosen blocks in two launches, one program a list: one sorts the lists, the other stores their tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.launcher import launches_of
from sparseflash.masks.fused.starts import MOST_SUMMED, start_of
from sparseflash.masks.fused.unused import clear_unused
from sparseflash.masks.tiling.chosen import RowFrame


def tiles_of_index(index: Tensor, counts: Tensor | None, of: RowFrame, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """The arrays `(indptr, indices, tile)` of the mask of `index [B, H, Mq, K]`, with room for `room` tiles."""
    index = index.contiguous()
    counts = None if counts is None else counts.contiguous()
    device, (rows, width), choices = index.device, of.kinds.shape, index.shape[3]
    lists = index.numel() // choices
    ordered = torch.empty(lists, choices, dtype=torch.int32, device=device)
    found = torch.empty(lists + 1, dtype=torch.int32, device=device)
    indices = torch.empty(room, dtype=torch.int32, device=device)
    tile, is_made = torch.empty_like(indices), lists > MOST_SUMMED
    padded = max(16, 1 << (choices - 1).bit_length())
    of_counts = None if counts is None else (counts.dtype, counts.data_ptr() % 16)
    key = device, padded, index.dtype, index.data_ptr() % 16, of_counts, is_made
    _sorting(*key).start(lists, index, counts, of.stop, ordered, found, rows, choices, padded)
    indptr = found.cumsum(0, dtype=torch.int32) if is_made else torch.empty_like(found)
    _storing(*key).start(
        lists, ordered, of.last_whole, of.kinds, found, indptr, indices, tile, rows, width, choices, room,
        -(-room // lists), padded, is_made,
    )  # fmt: skip
    return indptr, indices, tile


@triton.jit(do_not_specialize=["rows", "choices"])
def sort_kernel(
    index_ptr, counts_ptr, stop_ptr,  # int [lists, choices], int [lists] or None, int32 [rows]
    ordered_ptr, found_ptr,  # int32 [lists, choices], int32 [1 + lists], the first one 0
    rows, choices, CHOICES: tl.constexpr,
):  # fmt: skip
    """Writes the distinct blocks of one list that may be chosen, in ascending order, and counts them."""
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHOICES)
    here = lane < choices
    if counts_ptr is not None:
        here = here & (lane.to(tl.int64) < tl.load(counts_ptr + program).to(tl.int64))
    col = tl.load(index_ptr + program * choices + lane, mask=here, other=-1).to(tl.int64)
    here = here & (col >= 0) & (col < tl.load(stop_ptr + program % rows))
    col = tl.where(here, col, -1).to(tl.int32)
    again = (col[None, :] == col[:, None]) & (lane[None, :] < lane[:, None])
    first = here & (tl.max(again.to(tl.int32), 1) == 0)
    smaller = (first.to(tl.int32)[None, :] > 0) & (col[None, :] < col[:, None])
    rank = tl.sum(smaller.to(tl.int32), 1)
    tl.store(ordered_ptr + program * choices + rank, col, mask=first)
    tl.store(found_ptr + 1 + program, tl.sum(first.to(tl.int32), 0))
    if program == 0:
        tl.store(found_ptr, 0)


@triton.jit(do_not_specialize=["rows", "width", "choices", "room", "share"])
def store_kernel(
    ordered_ptr, last_whole_ptr, kinds_ptr,  # int32 [lists, choices], [rows], [rows, width]
    found_ptr, indptr_ptr, indices_ptr, tile_ptr,  # int32 [lists + 1] twice, [room] twice
    rows, width, choices, room, share,  # the part of the room that a program fills
    CHOICES: tl.constexpr, IS_MADE: tl.constexpr,
):  # fmt: skip
    """Stores the tiles of one row, and zeros in a part of the unused room."""
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHOICES)
    start, used = start_of(found_ptr, indptr_ptr, IS_MADE)
    here = lane < tl.load(found_ptr + 1 + program)
    col = tl.load(ordered_ptr + program * choices + lane, mask=here, other=0)
    row = program % rows
    at = tl.maximum(col - tl.load(last_whole_ptr + row), 0)
    kind = tl.load(kinds_ptr + row * width + at, mask=here, other=0)
    tl.store(indices_ptr + start + lane, col, mask=here)
    tl.store(tile_ptr + start + lane, kind, mask=here)
    clear_unused(indices_ptr, tile_ptr, used, share, room, CHOICES)


# One warp for short lists: several warps would exchange partial sums through shared memory, and take several times
# as many instructions in all.
_sorting = launches_of(sort_kernel, num_warps=1, num_stages=1, most=128)
_storing = launches_of(store_kernel, num_warps=1, num_stages=1, most=128)

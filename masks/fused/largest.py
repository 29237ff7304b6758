"""The largest scores of each row, however many: a radix selection, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.launcher import Launch
from sparseflash.blockmask.cache import bounded

_SIZE = 2048  # scores of a row that are read at once


def write_largest(
    scores: Tensor, begins: Tensor, stops: Tensor, index: Tensor, start: int, *, first: int = 0, last: int = 0
) -> None:
    """Writes into `index` the numbers of the largest scores of each row, ascending, and -1 if a row has fewer.

    Of equal scores the first ones are taken. NaN and -inf are never taken.

    Args:
        scores: fp32 `[lists, rows, n]`, contiguous.
        begins, stops: int32, of each of all rows: its candidates are those from `begin` to before `stop`. The other
            scores are not read.
        index: int32 `[lists, all rows, k]`, contiguous; the rows from `start` on are written.
        first, last: candidates at the beginning and at the end that are always taken.
    """
    lists, rows, count = scores.shape
    _kernel(index.data_ptr() % 16, scores.data_ptr() % 16, index.device).start(
        lists * rows, scores, begins, stops, index, rows, count, index.shape[1], start, index.shape[2], first, last,
        _SIZE,
    )  # fmt: skip


@bounded(maxsize=64)
def _kernel(*layout: object) -> Launch:
    device = layout[-1]
    assert isinstance(device, torch.device)
    return Launch.of_all_arguments(largest_kernel, device, num_warps=8, num_stages=2)


@triton.jit
def _keys(scores_ptr, number, begin, stop, first, last):
    """An integer of each score, greater for greater ones, and which are candidates."""
    inside = (number >= begin) & (number < stop)
    score = tl.load(scores_ptr + number, mask=inside, other=float("-inf")) + 0.0  # -0 equals 0
    forced = inside & ((number < begin + first) | (number >= stop - last))
    score = tl.where(forced, float("inf"), score)
    bits = score.to(tl.uint32, bitcast=True)
    key = tl.where(bits >= 0x80000000, ~bits, bits | 0x80000000)
    return key, inside & (score > float("-inf"))


@triton.jit
def _with_next_byte(
    scores_ptr, prefix, wanted, begin, stop, first, last, SHIFT: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """The prefix with one more byte of the `wanted`-th largest key of those that begin with it, and how many are wanted
    of those that begin with the new prefix."""
    lane, value = tl.arange(0, SIZE), tl.arange(0, 256)
    counts = tl.zeros([256], tl.int32)
    for at in range(begin // SIZE * SIZE, stop, SIZE):
        key, live = _keys(scores_ptr, at + lane, begin, stop, first, last)
        if SHIFT < 24:
            live = live & (((key ^ prefix) >> (SHIFT + 8)) == 0)
        counts += tl.histogram(((key >> SHIFT) & 255).to(tl.int32), 256, mask=live)
    not_below = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    digit = tl.max(tl.where(not_below >= wanted, value, 0), 0)
    wanted -= tl.sum(tl.where(value > digit, counts, 0), 0)
    return prefix | (digit.to(tl.uint32) << SHIFT), wanted


@triton.jit(do_not_specialize=["rows", "count", "all_rows", "start", "k", "first", "last"])
def largest_kernel(
    scores_ptr, begins_ptr, stops_ptr,  # fp32 [lists, rows, count]; int32 [all_rows]
    index_ptr,  # int32 [lists, all_rows, k], written
    rows, count, all_rows, start, k, first, last,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Finds the k-th largest key, its bytes from the highest on, by counting; then lists what is not below it."""
    lane = tl.arange(0, SIZE)
    row = tl.program_id(0) % rows
    scores_ptr += tl.program_id(0).to(tl.int64) * count
    index_ptr += ((tl.program_id(0) // rows).to(tl.int64) * all_rows + start + row) * k
    begin, stop = tl.load(begins_ptr + start + row), tl.load(stops_ptr + start + row)
    wanted = k
    prefix = tl.full([1], 0, tl.uint32)
    for step in tl.static_range(4):
        prefix, wanted = _with_next_byte(
            scores_ptr, prefix, wanted, begin, stop, first, last, SHIFT=24 - 8 * step, SIZE=SIZE
        )
    taken = 0
    equal = 0
    for at in range(begin // SIZE * SIZE, stop, SIZE):
        key, live = _keys(scores_ptr, at + lane, begin, stop, first, last)
        same = (live & (key == prefix)).to(tl.int32)
        earlier = equal + tl.cumsum(same, 0) - same
        take = (live & (key > prefix)).to(tl.int32)
        take += tl.where(earlier < wanted, same, 0)
        place = taken + tl.cumsum(take, 0) - take
        tl.store(index_ptr + place, at + lane, mask=take > 0)
        taken += tl.sum(take, 0)
        equal += tl.sum(same, 0)
    for at in range(taken // SIZE * SIZE, k, SIZE):
        tl.store(index_ptr + at + lane, tl.full([SIZE], -1, tl.int32), mask=(at + lane >= taken) & (at + lane < k))

"""The largest scores of each row, however many: in registers where a row, or what may be among them, fits there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.launcher import launches_of

_SIZE = 2048  # scores of a row that are read at once
_SHORT = 2048  # scores of a row that are in registers
_IN_REGISTERS = 4096  # scores of a program of four warps
_OF_A_WARP = 512  # of a program of one warp, for rows up to twice as long: no barrier in each of 32 steps
_WIDEST = 8192  # scores of a row that are in registers with all warps


def write_largest(
    scores: Tensor, begins: Tensor | None, stops: Tensor | None, index: Tensor, start: int, *, first: int = 0,
    last: int = 0,
) -> None:  # fmt: skip
    """Writes into `index` the numbers of the largest scores of each row, ascending, and -1 if a row has fewer.

    Of equal scores the first ones are taken. NaN and -inf are never taken.

    Args:
        scores: fp32 `[lists, rows, n]`, contiguous.
        begins, stops: int32, of each of all rows: its candidates are those from `begin` to before `stop`. The other
            scores are not read. None: all are candidates.
        index: int32 `[lists, all rows, k]`, contiguous; the rows from `start` on are written.
        first, last: candidates at the beginning and at the end that are always taken.
    """
    lists, rows, count = scores.shape
    if count <= _SHORT:
        size = max(16, 1 << (count - 1).bit_length())
        of_a_warp = size <= 2 * _OF_A_WARP
        rows_of = max(1, (_OF_A_WARP if of_a_warp else _IN_REGISTERS) // size)
        kernel = _shorter_kernel if of_a_warp else _short_kernel
        kernel(index.device, size, begins is None, index.data_ptr() % 16, scores.data_ptr() % 16).start(
            -(-lists * rows // rows_of), scores, begins, stops, index, lists, rows, count, index.shape[1], start,
            index.shape[2], first, last, rows_of, size,
        )  # fmt: skip
        return
    k = index.shape[2]
    width = max(1024, 2 << (k - 1).bit_length())
    width = width if width <= _WIDEST else 0
    scratch = torch.empty(lists * rows, width, dtype=torch.int32, device=index.device) if width else None
    _kernel(index.device, width, begins is None, index.data_ptr() % 16, scores.data_ptr() % 16).start(
        lists * rows, scores, begins, stops, index, scratch, rows, count, index.shape[1], start, k, first, last, _SIZE,
        width,
    )  # fmt: skip


@triton.jit
def _scores(scores_ptr, number, begin, stop, first, last):
    """The scores of candidates, inf for those that are always taken; -inf for others and for NaN."""
    inside = (number >= begin) & (number < stop)
    score = tl.load(scores_ptr + number, mask=inside, other=float("-inf")) + 0.0  # -0 equals 0
    forced = inside & ((number < begin + first) | (number >= stop - last))
    return tl.where(forced, float("inf"), tl.where(score == score, score, float("-inf")))


@triton.jit
def _key(score):
    """An integer for each score, greater for greater ones, and above 0."""
    bits = score.to(tl.uint32, bitcast=True)
    # Not ~bits: with NumPy 2 the interpreter of Triton 3.6 refuses -1 as an unsigned number.
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _keys(scores_ptr, number, begin, stop, first, last):
    """The keys of scores, and which are candidates."""
    score = _scores(scores_ptr, number, begin, stop, first, last)
    return _key(score), score > float("-inf")


@triton.jit
def _kth(key, k, ROWS: tl.constexpr):
    """The k-th largest of the keys `[ROWS, n]` of each row, its bits from the highest on; 0 if there are fewer."""
    kth = tl.zeros([ROWS], tl.uint32)
    for step in range(0, 32):
        higher = kth | (tl.full([ROWS], 1, tl.uint32) << (31 - step))
        kth = tl.where(tl.sum((key >= higher[:, None]).to(tl.int32), 1) >= k, higher, kth)
    return kth


@triton.jit
def _taken(key, live, kth, k):
    """Which of the keys `[ROWS, n]` are the k largest, the earlier of equals: 0 or 1."""
    above = (key > kth[:, None]).to(tl.int32)
    same = (live & (key == kth[:, None])).to(tl.int32)
    earlier = tl.cumsum(same, 1) - same
    return above + tl.where(earlier < (k - tl.sum(above, 1))[:, None], same, 0)


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


@triton.jit
def _write_by_bytes(scores_ptr, index_ptr, begin, stop, k, first, last, SIZE: tl.constexpr):
    """Finds the k-th largest key, its bytes from the highest on, by counting; lists what is not below it."""
    lane = tl.arange(0, SIZE)
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
    return taken


@triton.jit
def _candidates(scores_ptr, scratch_ptr, begin, stop, k, first, last, WIDTH: tl.constexpr):
    """Writes up to WIDTH numbers of scores that are not below a bound, in order, and counts them all.

    The scores are dealt to WIDTH places in turn. The bound is the k-th largest of the places' maxima: at least k scores
    are not below it, and hardly more if the scores are in no order.
    """
    lane = tl.arange(0, WIDTH)
    highest = tl.full([WIDTH], float("-inf"), tl.float32)
    for at in range(begin // WIDTH * WIDTH, stop, WIDTH):
        highest = tl.maximum(highest, _scores(scores_ptr, at + lane, begin, stop, first, last))
    key = tl.where(highest > float("-inf"), _key(highest), 0)
    bound = _kth(key[None, :], k, 1)
    found = 0
    for at in range(begin // WIDTH * WIDTH, stop, WIDTH):
        key, live = _keys(scores_ptr, at + lane, begin, stop, first, last)
        is_found = (live & (key >= bound)).to(tl.int32)
        place = found + tl.cumsum(is_found, 0) - is_found
        tl.store(scratch_ptr + place, at + lane, mask=(is_found > 0) & (place < WIDTH))
        found += tl.sum(is_found, 0)
    tl.debug_barrier()  # other threads read them
    return found


@triton.jit(
    do_not_specialize=["rows", "count", "all_rows", "start", "k", "first", "last"],
    do_not_specialize_on_alignment=["begins_ptr", "stops_ptr"],
)
def largest_kernel(
    scores_ptr, begins_ptr, stops_ptr,  # fp32 [lists, rows, count]; int32 [all_rows], or None
    index_ptr,  # int32 [lists, all_rows, k], written
    scratch_ptr,  # int32 [lists, rows, WIDTH], or None
    rows, count, all_rows, start, k, first, last,
    SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Lists the k largest scores of a row: in registers if few may be among them, else by reading it five times."""
    row = tl.program_id(0) % rows
    scores_ptr += tl.program_id(0).to(tl.int64) * count
    index_ptr += ((tl.program_id(0) // rows).to(tl.int64) * all_rows + start + row) * k
    begin, stop = 0, count
    if begins_ptr is not None:
        begin, stop = tl.load(begins_ptr + start + row), tl.minimum(tl.load(stops_ptr + start + row), count)
    taken = 0
    if WIDTH == 0:
        taken = _write_by_bytes(scores_ptr, index_ptr, begin, stop, k, first, last, SIZE)
    else:
        scratch_ptr += tl.program_id(0).to(tl.int64) * WIDTH
        found = _candidates(scores_ptr, scratch_ptr, begin, stop, k, first, last, WIDTH)
        if found <= WIDTH:
            place = tl.arange(0, WIDTH)
            number = tl.load(scratch_ptr + place, mask=place < found, other=-1)
            key, live = _keys(scores_ptr, number, begin, stop, first, last)
            key = tl.where(live, key, 0)[None, :]
            take = tl.reshape(_taken(key, live[None, :], _kth(key, k, 1), k), [WIDTH])
            tl.store(index_ptr + tl.cumsum(take, 0) - take, number, mask=take > 0)
            taken = tl.sum(take, 0)
        else:
            taken = _write_by_bytes(scores_ptr, index_ptr, begin, stop, k, first, last, SIZE)
    lane = tl.arange(0, SIZE)
    for at in range(taken // SIZE * SIZE, k, SIZE):
        tl.store(index_ptr + at + lane, tl.full([SIZE], -1, tl.int32), mask=(at + lane >= taken) & (at + lane < k))


@triton.jit(
    do_not_specialize=["lists", "rows", "count", "all_rows", "start", "k", "first", "last"],
    do_not_specialize_on_alignment=["begins_ptr", "stops_ptr"],
)
def short_kernel(
    scores_ptr, begins_ptr, stops_ptr, index_ptr,  # as in largest_kernel
    lists, rows, count, all_rows, start, k, first, last,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Finds the k-th largest key of each of ROWS rows, its bits from the highest on; lists what is not below it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # below 2^31; a division in 64 bits is slow
    number = tl.arange(0, SIZE)[None, :]
    exists = row < lists * rows
    in_list, at = row // rows, start + row % rows
    begin, stop = 0, tl.where(exists, count, 0)[:, None]
    if begins_ptr is not None:
        begin = tl.load(begins_ptr + at, mask=exists, other=0)[:, None]
        stop = tl.minimum(tl.load(stops_ptr + at, mask=exists, other=0)[:, None], stop)
    key, live = _keys(scores_ptr + (row.to(tl.int64) * count)[:, None], number, begin, stop, first, last)
    key = tl.where(live, key, 0)
    take = _taken(key, live, _kth(key, k, ROWS), k)
    index_ptr += ((in_list.to(tl.int64) * all_rows + at) * k)[:, None]
    tl.store(index_ptr + tl.cumsum(take, 1) - take, tl.broadcast_to(number, take.shape), mask=take > 0)
    taken = tl.sum(take, 1)[:, None]
    for slot in range(0, k, SIZE):
        tl.store(
            index_ptr + slot + number, tl.full([ROWS, SIZE], -1, tl.int32),
            mask=exists[:, None] & (slot + number >= taken) & (slot + number < k),
        )  # fmt: skip


_kernel = launches_of(largest_kernel, num_warps=8, num_stages=2)
_short_kernel = launches_of(short_kernel, num_warps=4, num_stages=1)
_shorter_kernel = launches_of(short_kernel, num_warps=1, num_stages=1)

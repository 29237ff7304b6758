"""Work on rows before and after the one pass of the Hopper backward: -lse and -delta of queries, and their dq."""

import triton
import triton.language as tl

from sparseflash.backends.triton.device_functions.softmax import LN2, LOWEST
from sparseflash.backends.triton.hopper.configs import BLOCK, COARSE

TILE_ROWS = tl.constexpr(BLOCK[0])  # queries of a tile
WIDTH = tl.constexpr(256)  # of the boxes in which the copy engine adds dq
# Padding by a bias uses numbers like -1e30, and a query may see padded keys alone. In an lse this low the weights are
# lost to rounding: they would be anything, also infinite, times a gradient that is mostly 0.
LOWEST_LSE = tl.constexpr(-COARSE * LN2.value)


@triton.jit
def finite_product(x, factor):
    """x * factor, but finite wherever x is, also in units of log2(e).

    Otherwise the lowest biases of fp32, and the lse of rows that have no others, would become infinite, and their
    difference NaN. Magnitudes are clamped to 3e38 / factor, or to 7.5e37 if that is less.
    """
    most = -LOWEST / tl.maximum(factor, 4.0)  # the forward multiplies by less than 3 / factor
    return tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -most), most), x) * factor


@triton.jit(
    do_not_specialize=["counters", "lengths_stride", "inverse_unit", "heads", "q_len", "row_tiles"],
    do_not_specialize_on_alignment=["lengths_ptr"],
)
def begin_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr,  # [B, Hq, Nq, Dv] both; fp32 [B, Hq, Nq] contiguous, the last or None
    # fp32 [B * Hq * row_tiles * STEPS, 2, ROWS], written: -lse in the units of scores.py, and -delta
    rows_ptr,
    counter_ptr, counters,  # int32 [counters], zeroed, or None
    lengths_ptr, lengths_stride,  # int32 [2, B] or None
    inverse_unit, heads, q_len, row_tiles, out_strides, dout_strides,
    D: tl.constexpr, PADDED_D: tl.constexpr, ROWS: tl.constexpr,
    STEPS: tl.constexpr,  # of a tile
):  # fmt: skip
    """-lse and -delta of ROWS queries. Queries without a live key, past the end or with an lse below LOWEST_LSE have
    -inf, so that their weights are 0.
    """
    number = tl.program_id(0)
    batch_head = number // (row_tiles * STEPS)
    batch, head = batch_head // heads, batch_head % heads
    row = number % (row_tiles * STEPS) * ROWS + tl.arange(0, ROWS)
    length = q_len
    if lengths_ptr is not None:
        length = tl.minimum(tl.load(lengths_ptr + batch), q_len)
    is_inside = row < length
    at = tl.cast(batch_head, tl.int64) * q_len + row
    lse = tl.load(lse_ptr + at, mask=is_inside, other=float("-inf"))
    is_live = lse > float("-inf")
    column = tl.arange(0, PADDED_D)
    loaded = is_live[:, None] & (column < D)[None, :]
    out_head = tl.cast(batch, tl.int64) * out_strides[0] + tl.cast(head, tl.int64) * out_strides[1]
    dout_head = tl.cast(batch, tl.int64) * dout_strides[0] + tl.cast(head, tl.int64) * dout_strides[1]
    row64 = tl.cast(row, tl.int64)[:, None]
    out = tl.load(out_ptr + out_head + row64 * out_strides[2] + column[None, :], mask=loaded, other=0.0)
    dout = tl.load(dout_ptr + dout_head + row64 * dout_strides[2] + column[None, :], mask=loaded, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at, mask=is_live, other=0.0)
    target = rows_ptr + tl.cast(number, tl.int64) * (2 * ROWS) + tl.arange(0, ROWS)
    tl.store(target, tl.where(lse >= LOWEST_LSE, finite_product(-lse, inverse_unit), float("-inf")))
    tl.store(target + ROWS, -delta)
    if counter_ptr is not None:
        each = tl.cdiv(counters, tl.num_programs(0))
        stop = tl.minimum((number + 1) * each, counters)
        for first in range(number * each, stop, ROWS):
            place = first + tl.arange(0, ROWS)
            tl.store(counter_ptr + place, tl.zeros([ROWS], tl.int32), mask=place < stop)


@triton.jit
def in_rows(dq, ROWS: tl.constexpr, D: tl.constexpr):
    """dq [ROWS, D]: undoes `backward.in_thread_order`."""
    return dq.reshape([D // 8, ROWS // 16, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([ROWS, D])


@triton.jit(
    do_not_specialize=["scale", "heads", "q_len", "row_tiles"], do_not_specialize_on_alignment=["chain_ptr"],
)  # fmt: skip
def finish_kernel(
    acc_ptr, chain_ptr,  # fp32 [chains, TILE_ROWS, SENT]; int32 [B * Hq * row_tiles + 1], the first of each tile
    counter_ptr,  # int32 [chains, STEPS], the additions to each; or None if every chain has some
    dq_ptr, scale, heads, q_len, row_tiles, dq_strides,
    D: tl.constexpr, SENT: tl.constexpr, PADDED_D: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """dq of ROWS queries: the sum of their chains, in order; 0 without a chain."""
    number = tl.program_id(0)
    tile, piece = number // STEPS, number % STEPS
    batch_head = tile // row_tiles
    batch, head = batch_head // heads, batch_head % heads
    local, column = tl.arange(0, ROWS), tl.arange(0, PADDED_D)
    row = (tile % row_tiles * STEPS + piece) * ROWS + local
    at = tl.arange(0, ROWS * PADDED_D)
    total = tl.zeros([ROWS * PADDED_D], tl.float32)
    first_chain = tl.load(chain_ptr + tile)
    for i in tl.range(0, tl.load(chain_ptr + tile + 1) - first_chain):
        place = (first_chain + i) * STEPS + piece
        count = ROWS * SENT
        if counter_ptr is not None:
            count = tl.where(tl.load(counter_ptr + place) > 0, count, 0)
        total += tl.load(acc_ptr + place.to(tl.int64) * (ROWS * SENT) + at, mask=at < count, other=0.0)
    total = in_rows(total, ROWS, PADDED_D)
    first = tl.cast(batch, tl.int64) * dq_strides[0] + tl.cast(head, tl.int64) * dq_strides[1]
    target = dq_ptr + first + tl.cast(row, tl.int64)[:, None] * dq_strides[2] + column[None, :]
    stored = (row < q_len)[:, None] & (column < D)[None, :]
    tl.store(target, (total * scale).to(dq_ptr.dtype.element_ty), mask=stored)

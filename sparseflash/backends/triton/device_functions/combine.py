"""Merges the partial results of rows and columns that were cut into chunks (split-K, see splits.py).

One program handles a few tokens of an item that was cut, and adds the chunks in order, without atomics, so the bits are
the same at every run.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.changes.sink import means_of_sink
from sparseflash.backends.triton.device_functions.delta import write_means
from sparseflash.backends.triton.device_functions.gradients import write_gradients
from sparseflash.backends.triton.device_functions.loads import part_pointers
from sparseflash.backends.triton.device_functions.results import write_rows
from sparseflash.backends.triton.device_functions.softmax import decay, finite_maximum
from sparseflash.backends.triton.schedule.work_item import CUT_FIRST_PART, CUT_ITEM, CUT_NUMBER, CUT_PARTS

# Pipeline depth of the loads. Without prefetching, their latency would dominate.
AHEAD = tl.constexpr(4)
TOKENS_TO_COMBINE = 16  # tokens per program: few, because there may be few cut items, each with many chunks


@triton.jit
def cut_item(merged_ptr, number):
    """`(number, first part, number of parts)` of an item that was cut."""
    item_ptr = merged_ptr + number * CUT_ITEM
    return tl.load(item_ptr + CUT_NUMBER), tl.load(item_ptr + CUT_FIRST_PART), tl.load(item_ptr + CUT_PARTS)


@triton.jit(
    do_not_specialize=["lengths_offset", "amplification", "scale", "qk_scale", "heads", "q_len", "row_tiles"],
    do_not_specialize_on_alignment=["lengths_ptr"],
)
def combine_rows_kernel(
    parts_ptr, merged_ptr,  # fp32 [parts, BLOCK_M * (PADDED_DV + 2)], as in forward_kernel; [cut, CUT_ITEM]
    out_ptr, lse_ptr, maximum_ptr, inverse_ptr,  # as in forward_kernel
    lengths_ptr, lengths_offset,  # int32 [2, B] or None, and the offset of the lengths of queries
    amplification, scale, qk_scale, heads, q_len, row_tiles, out_strides,
    sink_ptr,  # [Hq], or None
    DV: tl.constexpr, PADDED_DV: tl.constexpr, BLOCK_M: tl.constexpr, TOKENS: tl.constexpr, DROPOUT: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Merges out and lse of TOKENS queries. A chunk without a live key has maximum -inf and sum 0."""
    SIZE: tl.constexpr = BLOCK_M * (PADDED_DV + 2)
    SUMS: tl.constexpr = BLOCK_M * PADDED_DV
    item, first_part, parts = cut_item(merged_ptr, tl.program_id(0) // (BLOCK_M // TOKENS))
    token = tl.program_id(0) % (BLOCK_M // TOKENS) * TOKENS
    batch_head = item // row_tiles
    first_q = item % row_tiles * BLOCK_M + token
    batch, head = batch_head // heads, batch_head % heads
    length = q_len
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + lengths_offset + batch)

    m_i = tl.full([TOKENS, 1], float("-inf"), tl.float32)
    for i in tl.range(0, parts, num_stages=AHEAD):
        m_part = tl.load(part_pointers(parts_ptr + token, first_part + i, SIZE, SUMS, TOKENS, 1))
        m_i = tl.maximum(m_i, m_part)
    m_safe = finite_maximum(m_i)
    l_i = tl.zeros([TOKENS, 1], tl.float32)
    acc = tl.zeros([TOKENS, PADDED_DV], tl.float32)
    for i in tl.range(0, parts, num_stages=AHEAD):
        m_part = tl.load(part_pointers(parts_ptr + token, first_part + i, SIZE, SUMS, TOKENS, 1))
        l_part = tl.load(part_pointers(parts_ptr + token, first_part + i, SIZE, SUMS + BLOCK_M, TOKENS, 1))
        acc_part = tl.load(part_pointers(parts_ptr + token * PADDED_DV, first_part + i, SIZE, 0, TOKENS, PADDED_DV))
        alpha = decay(m_part, m_safe, qk_scale, KEEP)
        l_i += l_part * alpha
        acc += acc_part * alpha
    write_rows(
        acc, m_i.reshape(TOKENS), l_i.reshape(TOKENS), out_ptr, lse_ptr, maximum_ptr, inverse_ptr, batch_head, batch,
        head, first_q, q_len, length, amplification, scale, qk_scale, sink_ptr, out_strides, DV, PADDED_DV, TOKENS,
        lengths_ptr is not None, DROPOUT, KEEP,
    )  # fmt: skip


@triton.jit
def sum_of_parts(
    parts_ptr, token, first_part, parts, SIZE: tl.constexpr, FIRST: tl.constexpr, TOKENS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """The sum of the parts, for TOKENS tokens: [TOKENS, PADDED_DIM]."""
    total = tl.zeros([TOKENS, PADDED_DIM], tl.float32)
    for i in tl.range(0, parts, num_stages=AHEAD):
        at = part_pointers(parts_ptr + token * PADDED_DIM, first_part + i, SIZE, FIRST, TOKENS, PADDED_DIM)
        total += tl.load(at)
    return total


@triton.jit(
    do_not_specialize=["lengths_offset", "amplification", "scale", "heads", "tokens", "tiles"],
    do_not_specialize_on_alignment=["lengths_ptr"],
)
def combine_gradients_kernel(
    parts_ptr, merged_ptr,  # fp32 [parts, BLOCK * (PADDED_D + PADDED_DV)], or without PADDED_DV; [cut, CUT_ITEM]
    x_ptr, y_ptr,  # dk and dv, or dq and None
    lengths_ptr, lengths_offset,  # int32 [2, B] or None, and the offset of the lengths of keys
    amplification, scale, heads, tokens, tiles, x_strides, y_strides,
    D: tl.constexpr, DV: tl.constexpr, PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Merges dk and dv of TOKENS keys, or dq of TOKENS queries."""
    SIZE: tl.constexpr = BLOCK * PADDED_D if y_ptr is None else BLOCK * (PADDED_D + PADDED_DV)
    item, first_part, parts = cut_item(merged_ptr, tl.program_id(0) // (BLOCK // TOKENS))
    token = tl.program_id(0) % (BLOCK // TOKENS) * TOKENS
    batch_head = item // tiles
    first = item % tiles * BLOCK + token
    batch, head = batch_head // heads, batch_head % heads
    length = tokens
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + lengths_offset + batch)
    CUT: tl.constexpr = lengths_ptr is not None
    x = sum_of_parts(parts_ptr, token, first_part, parts, SIZE, 0, TOKENS, PADDED_D)
    write_gradients(x, x_ptr, scale, batch, head, first, tokens, length, x_strides, D, PADDED_D, TOKENS, True, CUT)
    if y_ptr is not None:
        y = sum_of_parts(parts_ptr, token, first_part, parts, SIZE, BLOCK * PADDED_D, TOKENS, PADDED_DV)
        write_gradients(
            y, y_ptr, amplification, batch, head, first, tokens, length, y_strides, DV, PADDED_DV, TOKENS,
            DROPOUT, CUT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "q_len", "row_tiles"])
def combine_means_kernel(
    parts_ptr, merged_ptr,  # fp32 [parts, BLOCK_M * 3], as in dq_kernel; [cut, CUT_ITEM]
    inverse_ptr, delta_ptr, own_inverse_ptr,  # [B, Hq, Nq] contiguous; the last two are written
    maximum_ptr, sink_ptr, heads,  # as in forward_kernel; the first two None without a sink
    q_len, row_tiles, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merges delta and the inverse sums of BLOCK_M queries. All chunks of a row have the same estimate of delta."""
    SIZE: tl.constexpr = BLOCK_M * 3
    item, first_part, parts = cut_item(merged_ptr, tl.program_id(0))
    rows = item % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.cast(item // row_tiles, tl.int64) * q_len + rows
    delta = sum_of_parts(parts_ptr, 0, first_part, parts, SIZE, 0, BLOCK_M, 1).reshape(BLOCK_M)
    weight = sum_of_parts(parts_ptr, 0, first_part, parts, SIZE, BLOCK_M, BLOCK_M, 1).reshape(BLOCK_M)
    estimate = tl.load(part_pointers(parts_ptr, first_part, SIZE, 2 * BLOCK_M, BLOCK_M, 1)).reshape(BLOCK_M)
    inverse = tl.load(inverse_ptr + at, mask=rows < q_len, other=0.0)
    if sink_ptr is not None:
        maximum = tl.load(maximum_ptr + at, mask=rows < q_len, other=0.0)
        delta, weight = means_of_sink(delta, weight, estimate, inverse, maximum, sink_ptr, item // row_tiles % heads)
    write_means(delta, weight, estimate, inverse, delta_ptr, own_inverse_ptr, at, rows < q_len)

"""dQ and delta: one program per tile of queries walks the live tiles of its row. This kernel runs before `dk_dv.py`.

Probabilities are recomputed from the scores and the forward's lse. Each output is written by one program, without
atomics, so the bits are the same at every run.

If few keys have nearly all the weight, the gradient of a score is the difference of two nearly equal numbers, dp and
delta. In half precision, delta = rowsum(out * dout) - dlse is accurate enough. In fp32 a pass with DELTA runs first: it
computes delta as the mean of dp under p, with p and dp exactly as in the passes that subtract delta from dp,
accumulated as the difference from rowsum(out * dout); dlse is added after the subtraction. It also recomputes the
inverse sums of the exponentials from the backward's scores, by Kahan sums over the tiles, because their rounding error
would be common to all gradients of the row.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.changes.kind import WHOLE_NUMBERS
from sparseflash.backends.triton.changes.sink import means_of_sink
from sparseflash.backends.triton.changes.steps import begun, finish, no_sums
from sparseflash.backends.triton.device_functions.delta import means_step, write_means, write_part_of_means
from sparseflash.backends.triton.device_functions.fp32_split import in_fp32
from sparseflash.backends.triton.device_functions.gradients import lse_gradients, write_gradients
from sparseflash.backends.triton.device_functions.loads import load_columns, load_tokens, part_pointers
from sparseflash.backends.triton.device_functions.softmax import LOG2E
from sparseflash.backends.triton.portable.dq_step import dq_step, row_step
from sparseflash.backends.triton.portable.dropout import DropoutArguments
from sparseflash.backends.triton.portable.walk import listed_block, part_of, partial_tile, row_item, tokens_of_block
from sparseflash.backends.triton.schedule.work_item import ITEM


@triton.jit(
    do_not_specialize=[
        "lengths_stride", "dropped", "heads", "group", "q_len", "k_len",
        "row_tiles", "row_stride",
        *WHOLE_NUMBERS,
    ],
    # Few numbers are loaded from these at a time, so their alignment does not matter.
    do_not_specialize_on_alignment=["lengths_ptr", "seed_ptr", "rows_ptr", "queries_ptr", "groups_ptr"],
)  # fmt: skip
def dq_kernel(
    q, k, v,  # pointers, or descriptors if TMA
    dout_ptr, out_ptr,  # [B, Hq, Nq, DV]; out is the forward's
    lse_ptr, dlse_ptr,  # [B, Hq, Nq] contiguous: the forward's lse, and its gradient or None
    # lse2 and delta, [B, Hq, row_stride], written; if KEEP, the forward's maximum, inverse_ptr, and delta, written if
    # DELTA.
    own_rows, inverse_ptr,
    dq_ptr,  # [B, Hq, Nq, D], written unless DELTA
    own_inverse_ptr,  # [B, Hq, row_stride], written if DELTA
    work_ptr,
    parts_ptr,  # fp32 [parts, BLOCK_M * PADDED_D], written: dq, or if DELTA [parts, BLOCK_M * 3]; or None
    index_ptr, tile_ptr, words_ptr, lengths_ptr, lengths_stride,
    seed_ptr, rows_ptr, queries_ptr, groups_ptr,  # if DROPOUT: see dropout.py; int32 [B, Hq], [Nq], [groups], or None
    dropped,  # if DROPOUT
    scales, heads, group, q_len, k_len, row_tiles, row_stride,
    strides,  # of q, k, v, dout, out and dq
    changes, change_numbers,  # tensors and numbers of each score modification, see changes/kind.py; or None
    n0, n1, n2, n3, n4, n5, n6, n7,  # WHOLE_NUMBERS: `Kind.whole` of all score modifications, concatenated
    sink_ptr,  # [Hq], or None; read if DELTA
    learned,  # memory for the gradients of each score modification's tensors; None if no tensor is learned
    SHAPE: tl.constexpr, CHANGES: tl.constexpr,  # as in the forward
):  # fmt: skip
    """Computes dQ of one tile of queries, and lse2 and delta for dk_dv_kernel; if DELTA, only delta and inverse sums.

    lse2 is the lse in base 2, and delta = rowsum(p * dp) - dlse. Queries without keys have lse2 = +inf and delta = 0,
    so that p = exp2(s - inf) = 0 without a check.
    """
    PRECISION: tl.constexpr = SHAPE.PRECISION
    q_strides, k_strides, v_strides, dout_strides, out_strides, dq_strides = strides
    scale, qk_scale, amplification = scales
    lse2_ptr, delta_ptr = own_rows
    SPLIT: tl.constexpr = SHAPE.BLOCK_K // SHAPE.BLOCK_N
    tl.static_assert(SHAPE.GATHERED == 0 or SPLIT == 1, "a gathered tile is taken whole")
    item_ptr = work_ptr + tl.cast(tl.program_id(0), tl.int64) * ITEM
    place, lists, firsts, live_tokens = row_item(
        item_ptr, index_ptr, lengths_ptr, lengths_stride, heads, group, row_tiles, q_len, k_len,
        SHAPE.BLOCK_K, SHAPE.BLOCK_M, SHAPE.BLOCK_N, SHAPE.GATHERED, SHAPE.HAS_LENGTHS,
    )  # fmt: skip
    batch_head, batch, head, _, first_q = place
    start, full, at_end, partial, first_partial = lists
    next_block, partial_block, partial_number = firsts
    q_length, k_length = live_tokens

    rows = first_q + tl.arange(0, SHAPE.BLOCK_M)
    row = tl.cast(batch_head, tl.int64) * row_stride
    dlse, inverse = None, None
    # A descriptor load blocks until it completes, so pointer loads are issued first, to overlap with it.
    dout_tile = load_tokens(
        dout_ptr, batch, head, first_q, q_len, dout_strides, SHAPE.DV, SHAPE.PADDED_DV, SHAPE.BLOCK_M, False, False,
        PRECISION,
    )  # fmt: skip
    if SHAPE.DELTA or not SHAPE.KEEP:
        out_tile = load_columns(
            out_ptr, batch, head, first_q, q_len, out_strides, 0, SHAPE.DV, SHAPE.PADDED_DV, SHAPE.BLOCK_M, False, False
        )  # fmt: skip
    if SHAPE.KEEP:
        lse2 = tl.load(lse2_ptr + row + rows, mask=rows < q_len, other=0.0)
        inverse = tl.load(inverse_ptr + row + rows, mask=rows < q_len, other=0.0)
        if dlse_ptr is not None:
            dlse = lse_gradients(dlse_ptr + row + rows, rows < q_len, inverse[:, None], 1)
    else:
        at_q = tl.cast(batch_head, tl.int64) * q_len + rows
        lse = tl.load(lse_ptr + at_q, mask=rows < q_len, other=float("-inf"))
        if dlse_ptr is not None:
            own_dlse = tl.load(dlse_ptr + at_q, mask=rows < q_len, other=0.0)
    q_tile = load_tokens(
        q, batch, head, first_q, q_len, q_strides, SHAPE.D, SHAPE.PADDED_D, SHAPE.BLOCK_M, False, SHAPE.TMA, PRECISION
    )
    if SHAPE.DELTA or not SHAPE.KEEP:
        estimate = tl.sum(out_tile.to(tl.float32) * in_fp32(dout_tile, PRECISION), 1)
    if SHAPE.DELTA:
        delta = tl.full([SHAPE.BLOCK_M], 0.0, tl.float32)
        weight, lost = tl.full([SHAPE.BLOCK_M], 0.0, tl.float32), tl.full([SHAPE.BLOCK_M], 0.0, tl.float32)
    elif SHAPE.KEEP:
        delta = tl.load(delta_ptr + row + rows, mask=rows < q_len, other=0.0)
    else:
        empty = lse == float("-inf")
        lse2 = tl.where(empty, float("inf"), lse * LOG2E)
        delta = estimate
        if dlse_ptr is not None:
            delta -= own_dlse
        delta = tl.where(empty, 0.0, delta)
        # All chunks of a split row write the same values.
        tl.store(delta_ptr + row + rows, delta, mask=rows < q_len)
        tl.store(lse2_ptr + row + rows, lse2, mask=rows < q_len)
    dq = tl.full([SHAPE.BLOCK_M, SHAPE.PADDED_D], 0.0, tl.float32)
    changes = begun(CHANGES, changes, change_numbers, (n0, n1, n2, n3, n4, n5, n6, n7), learned)
    live_queries = q_length if SHAPE.HAS_LENGTHS else None
    dropout = DropoutArguments(seed_ptr, rows_ptr, queries_ptr, groups_ptr, dropped, amplification)
    sums = no_sums(CHANGES, SHAPE.BLOCK_M)

    for i in range(0, full * SPLIT):
        first_k = tokens_of_block(next_block, i, SHAPE.BLOCK_K, SHAPE.BLOCK_N, SHAPE.GATHERED)
        next_block = listed_block(index_ptr, start, (i + 1) // SPLIT, SHAPE.BLOCK_N, SHAPE.GATHERED)
        k_tile, exps, p, dp, kept = row_step(
            q_tile, dout_tile, k, v, lse2, inverse, words_ptr, 0, place, first_k, q_len, k_len, k_length, scale,
            qk_scale, k_strides, v_strides, dropout, changes, live_queries, SHAPE, CHANGES, False,
        )  # fmt: skip
        if SHAPE.DELTA:
            delta, weight, lost = means_step(delta, weight, lost, exps, p, dp, estimate)
        else:
            dq, sums = dq_step(
                dq, sums, k_tile, p, dp, delta, dlse, kept, changes, place, first_k, q_len, k_len, live_queries,
                SHAPE, CHANGES, False,
            )  # fmt: skip

    if at_end + partial > 0:
        next_block, next_tile = partial_block, partial_number
        if SHAPE.HAS_LENGTHS:
            if at_end > 0:
                next_block, next_tile = partial_tile(
                    index_ptr, tile_ptr, start + full, at_end, first_partial, 0, SHAPE.BLOCK_N, SHAPE.GATHERED, True
                )
        for i in range(0, (at_end + partial) * SPLIT):
            first_k = tokens_of_block(next_block, i, SHAPE.BLOCK_K, SHAPE.BLOCK_N, SHAPE.GATHERED)
            tile = next_tile
            next_block, next_tile = partial_tile(
                index_ptr, tile_ptr, start + full, at_end, first_partial, (i + 1) // SPLIT, SHAPE.BLOCK_N,
                SHAPE.GATHERED, SHAPE.HAS_LENGTHS,
            )  # fmt: skip
            k_tile, exps, p, dp, kept = row_step(
                q_tile, dout_tile, k, v, lse2, inverse, words_ptr, tile, place, first_k, q_len, k_len, k_length, scale,
                qk_scale, k_strides, v_strides, dropout, changes, live_queries, SHAPE, CHANGES, True,
            )  # fmt: skip
            if SHAPE.DELTA:
                delta, weight, lost = means_step(delta, weight, lost, exps, p, dp, estimate)
            else:
                dq, sums = dq_step(
                    dq, sums, k_tile, p, dp, delta, dlse, kept, changes, place, first_k, q_len, k_len, live_queries,
                    SHAPE, CHANGES, True,
                )  # fmt: skip

    finish(CHANGES, changes, sums, tl.cast(tl.program_id(0), tl.int64), 0, 0, SHAPE.BLOCK_M, False)
    at = row + rows
    part = part_of(item_ptr, parts_ptr)
    if parts_ptr is not None and part > 0:
        if SHAPE.DELTA:
            write_part_of_means(delta, weight, estimate, parts_ptr, part - 1, SHAPE.BLOCK_M)
        else:
            SIZE: tl.constexpr = SHAPE.BLOCK_M * SHAPE.PADDED_D
            tl.store(part_pointers(parts_ptr, part - 1, SIZE, 0, SHAPE.BLOCK_M, SHAPE.PADDED_D), dq)
    elif SHAPE.DELTA:
        if sink_ptr is not None:
            delta, weight = means_of_sink(delta, weight, estimate, inverse, lse2, sink_ptr, head)
        write_means(delta, weight, estimate, inverse, delta_ptr, own_inverse_ptr, at, rows < q_len)
    else:
        write_gradients(
            dq, dq_ptr, scale, batch, head, first_q, q_len, q_length, dq_strides, SHAPE.D, SHAPE.PADDED_D,
            SHAPE.BLOCK_M, True, False,
        )  # fmt: skip

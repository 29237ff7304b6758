"""dK and dV: one program per tile of keys walks the live tiles of its column.

Probabilities are recomputed from the scores and from lse2 and delta, which `dq.py` writes. Each output is written by
one program, without atomics, so the bits are the same at every run.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.changes.kind import WHOLE_NUMBERS, At
from sparseflash.backends.triton.changes.steps import begun, changed_scores, finish, gradients_before, loaded, no_sums
from sparseflash.backends.triton.device_functions.fp32_split import accumulate, products
from sparseflash.backends.triton.device_functions.gradients import lse_gradients, write_gradients
from sparseflash.backends.triton.device_functions.loads import (
    live_scores,
    load_tokens,
    numbers_of_rows,
    part_pointers,
    token_numbers,
)
from sparseflash.backends.triton.device_functions.softmax import recomputed_weights, score_gradients
from sparseflash.backends.triton.portable.dropout import DropoutArguments, kept_weights
from sparseflash.backends.triton.portable.walk import (
    cut_at_length,
    list_of_item,
    listed_block,
    part_of,
    partial_tile,
    tokens_of_block,
)
from sparseflash.backends.triton.schedule.work_item import ITEM, ITEM_NUMBER


@triton.jit
def dk_dv_step(
    dk, dv, sums, k_tile, v_tile, q, dout, lse2, inverse_ptr, delta, dlse_ptr, batch, head, heads,
    first_q, q_len, first_k, k_len, words_ptr, tile, scale, qk_scale, q_strides, dout_strides, row_stride, dropout,
    changes, live_queries,
    SHAPE: tl.constexpr, CHANGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of one tile of queries to dk (without the scale), dv, and the sums of score modifications.

    Scores are [keys, queries] here.
    """
    PRECISION: tl.constexpr = SHAPE.PRECISION
    rows = token_numbers(first_q, SHAPE.BLOCK_M)
    batch_head = batch * heads + head
    q_tile = load_tokens(
        q, batch, head, first_q, q_len, q_strides, SHAPE.D, SHAPE.PADDED_D, SHAPE.BLOCK_M, not MASKED, SHAPE.TMA,
        PRECISION,
    )  # fmt: skip
    # The bits of the tile mask the scores of queries past the end. Their lse2 only has to give finite exponentials: any
    # finite maximum does (if KEEP), and otherwise +inf, which makes them 0.
    lse2_row = numbers_of_rows(
        lse2, batch_head, first_q, rows, q_len, row_stride, 0.0 if SHAPE.KEEP else float("inf"),
        SHAPE.BLOCK_M, not MASKED, SHAPE.ROWS_TMA,
    )  # fmt: skip
    delta_row = numbers_of_rows(
        delta, batch_head, first_q, rows, q_len, row_stride, 0.0, SHAPE.BLOCK_M, not MASKED, SHAPE.ROWS_TMA
    )
    # In full fp32, scores and dp are summed in the same order as in dq_kernel, so that dp and delta, which is
    # subtracted from it, have the same rounding errors.
    if CHANGES is not None:
        where = At(batch, head, batch_head, first_q, first_k, q_len, k_len, live_queries)
        read = loaded(CHANGES, changes, where, SHAPE.BLOCK_Q, SHAPE.BLOCK_K, SHAPE.BLOCK_M, SHAPE.BLOCK_N, MASKED, True)
    scores = products(k_tile, q_tile, PRECISION, True)
    if CHANGES is not None:
        scores, kept = changed_scores(CHANGES, changes, read, scores, scale, where, SHAPE.BLOCK_M, SHAPE.BLOCK_N, True)
    inverse, dlse, live = None, None, None
    if SHAPE.KEEP:
        at = tl.cast(batch_head, tl.int64) * row_stride + rows
        inverse = tl.load(inverse_ptr + at, mask=rows < q_len, other=0.0)[None, :]
    if MASKED:
        patch_q = 0 if SHAPE.GATHERED > 0 else first_q
        live = live_scores(
            words_ptr, tile, patch_q, first_k, SHAPE.BLOCK_Q, SHAPE.BLOCK_K, SHAPE.BLOCK_M, SHAPE.BLOCK_N, False, True
        )
    _, p = recomputed_weights(
        scores, live, lse2_row[None, :], inverse, qk_scale, SHAPE.KEEP, PRECISION, CHANGES is not None
    )
    dout_tile = load_tokens(
        dout, batch, head, first_q, q_len, dout_strides, SHAPE.DV, SHAPE.PADDED_DV, SHAPE.BLOCK_M, not MASKED,
        SHAPE.TMA, PRECISION,
    )  # fmt: skip
    passed = p
    if SHAPE.DROPOUT:
        keep = kept_weights(dropout, batch_head, first_q, first_k, q_len, k_len, SHAPE.BLOCK_M, SHAPE.BLOCK_N, True)
        passed = tl.where(keep, p, 0.0)
    dv = accumulate(passed, dout_tile, dv, PRECISION)
    dp = products(v_tile, dout_tile, PRECISION, True)
    if SHAPE.DROPOUT:
        dp = tl.where(keep, dp * dropout.amplification, 0.0)
    if SHAPE.KEEP:
        if dlse_ptr is not None:
            dlse = lse_gradients(dlse_ptr + at, rows < q_len, inverse, 0)
    ds = score_gradients(p, dp, delta_row[None, :], dlse)
    if CHANGES is not None:
        ds, sums = gradients_before(CHANGES, changes, sums, ds, kept, where, SHAPE.BLOCK_Q, SHAPE.BLOCK_K, MASKED)
    return accumulate(ds, q_tile, dk, PRECISION), dv, sums


# Sizes are not specialised, so another length or number of heads does not recompile.
@triton.jit(
    do_not_specialize=[
        "lengths_stride", "dropped", "kv_heads", "group", "q_len", "k_len",
        "col_tiles", "row_stride",
        *WHOLE_NUMBERS,
    ],
    # Few numbers are loaded from these at a time, so their alignment does not matter.
    do_not_specialize_on_alignment=["lengths_ptr", "seed_ptr", "rows_ptr", "queries_ptr", "groups_ptr"],
)  # fmt: skip
def dk_dv_kernel(
    q, k, v, dout,  # pointers, or descriptors if TMA
    lse2, inverse_ptr, delta,  # [B, Hq, row_stride]: see dq_kernel; lse2 and delta are descriptors if ROWS_TMA
    dlse_ptr,  # [B, Hq, Nq] contiguous, or None; only if KEEP, see dq_kernel
    dk_ptr, dv_ptr,  # [B, Hkv, Nk, D], [B, Hkv, Nk, DV], written
    work_ptr,  # [W, group, ITEM]: as in the forward, but over columns, with one list per query head of the group
    parts_ptr,  # fp32 [parts, BLOCK_N * (PADDED_D + PADDED_DV)], written: dk, dv; None if no item is a chunk
    index_ptr, tile_ptr, words_ptr, lengths_ptr, lengths_stride,
    seed_ptr, rows_ptr, queries_ptr, groups_ptr,  # if DROPOUT: see dropout.py; int32 [B, Hq], [Nq], [groups], or None
    dropped,  # if DROPOUT
    scales,  # as in the forward
    kv_heads, group, q_len, k_len, col_tiles, row_stride,
    strides,  # of q, k, v, dout, dk and dv
    changes, change_numbers,  # tensors and numbers of each score modification, see changes/kind.py; or None
    n0, n1, n2, n3, n4, n5, n6, n7,  # WHOLE_NUMBERS: `Kind.whole` of all score modifications, concatenated
    learned,  # as in dq_kernel
    SHAPE: tl.constexpr, CHANGES: tl.constexpr,  # as in the forward
):  # fmt: skip
    """Computes dK and dV of one tile of keys."""
    PRECISION: tl.constexpr = SHAPE.PRECISION
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides = strides
    scale, qk_scale, amplification = scales
    SPLIT: tl.constexpr = SHAPE.BLOCK_Q // SHAPE.BLOCK_M
    tl.static_assert(SHAPE.GATHERED == 0 or SPLIT == 1, "a gathered tile is taken whole")
    item_ptr = work_ptr + tl.cast(tl.program_id(0), tl.int64) * group * ITEM
    item = tl.load(item_ptr + ITEM_NUMBER)
    batch_kv_head = item // col_tiles
    first_k = item % col_tiles * SHAPE.BLOCK_N
    batch, kv_head = batch_kv_head // kv_heads, batch_kv_head % kv_heads
    q_length, k_length = q_len, k_len
    if SHAPE.HAS_LENGTHS:
        q_length, k_length = tl.load(lengths_ptr + batch), tl.load(lengths_ptr + lengths_stride + batch)

    k_tile = load_tokens(
        k, batch, kv_head, first_k, k_len, k_strides, SHAPE.D, SHAPE.PADDED_D, SHAPE.BLOCK_N, False, SHAPE.TMA,
        PRECISION,
    )  # fmt: skip
    v_tile = load_tokens(
        v, batch, kv_head, first_k, k_len, v_strides, SHAPE.DV, SHAPE.PADDED_DV, SHAPE.BLOCK_N, False, SHAPE.TMA,
        PRECISION,
    )  # fmt: skip
    dk = tl.full([SHAPE.BLOCK_N, SHAPE.PADDED_D], 0.0, tl.float32)
    dv = tl.full([SHAPE.BLOCK_N, SHAPE.PADDED_DV], 0.0, tl.float32)
    changes = begun(CHANGES, changes, change_numbers, (n0, n1, n2, n3, n4, n5, n6, n7), learned)
    live_queries = q_length if SHAPE.HAS_LENGTHS else None
    dropout = DropoutArguments(seed_ptr, rows_ptr, queries_ptr, groups_ptr, dropped, amplification)
    sums = no_sums(CHANGES, SHAPE.BLOCK_N)
    for member in range(0, group):
        list_ptr = item_ptr + member * ITEM
        listed, firsts = list_of_item(list_ptr, index_ptr, SHAPE.BLOCK_M, SHAPE.GATHERED)
        start, full, count = listed
        next_block, partial_block, partial_number = firsts
        partial = count - full
        first_partial = start + full
        if SHAPE.HAS_LENGTHS:
            if first_k >= k_length:
                full, count = 0, 0
            # A query past the length has lse2 = +inf (inverse 0 if KEEP), so a full tile that the length cuts needs no
            # mask.
            inside, at_end, partial = cut_at_length(
                index_ptr, start, full, count, q_length, SHAPE.BLOCK_Q, SHAPE.BLOCK_M, SHAPE.GATHERED
            )
            full = inside + at_end
        head = kv_head * group + member
        sums = no_sums(CHANGES, SHAPE.BLOCK_N)
        for i in range(0, full * SPLIT):
            first_q = tokens_of_block(next_block, i, SHAPE.BLOCK_Q, SHAPE.BLOCK_M, SHAPE.GATHERED)
            next_block = listed_block(index_ptr, start, (i + 1) // SPLIT, SHAPE.BLOCK_M, SHAPE.GATHERED)
            dk, dv, sums = dk_dv_step(
                dk, dv, sums, k_tile, v_tile, q, dout, lse2, inverse_ptr, delta, dlse_ptr,
                batch, head, kv_heads * group, first_q, q_len, first_k, k_len, words_ptr, 0, scale, qk_scale, q_strides,
                dout_strides, row_stride, dropout, changes, live_queries, SHAPE, CHANGES, False,
            )  # fmt: skip
        if partial > 0:  # as in the forward
            next_block, next_tile = partial_block, partial_number
            for i in range(0, partial * SPLIT):
                first_q = tokens_of_block(next_block, i, SHAPE.BLOCK_Q, SHAPE.BLOCK_M, SHAPE.GATHERED)
                tile = next_tile
                next_block, next_tile = partial_tile(
                    index_ptr, tile_ptr, 0, 0, first_partial, (i + 1) // SPLIT, SHAPE.BLOCK_M, SHAPE.GATHERED, False
                )
                dk, dv, sums = dk_dv_step(
                    dk, dv, sums, k_tile, v_tile, q, dout, lse2, inverse_ptr, delta, dlse_ptr,
                    batch, head, kv_heads * group, first_q, q_len, first_k, k_len, words_ptr, tile, scale, qk_scale,
                    q_strides, dout_strides, row_stride, dropout, changes, live_queries, SHAPE, CHANGES, True,
                )  # fmt: skip
        place = tl.cast(tl.program_id(0), tl.int64) * group + member
        finish(CHANGES, changes, sums, place, first_k, k_length, SHAPE.BLOCK_N, SHAPE.HAS_LENGTHS)

    part = part_of(item_ptr, parts_ptr)
    if parts_ptr is not None and part > 0:
        SIZE: tl.constexpr = SHAPE.BLOCK_N * (SHAPE.PADDED_D + SHAPE.PADDED_DV)
        tl.store(part_pointers(parts_ptr, part - 1, SIZE, 0, SHAPE.BLOCK_N, SHAPE.PADDED_D), dk)
        tl.store(
            part_pointers(parts_ptr, part - 1, SIZE, SHAPE.BLOCK_N * SHAPE.PADDED_D, SHAPE.BLOCK_N, SHAPE.PADDED_DV), dv
        )
    else:
        write_gradients(
            dk, dk_ptr, scale, batch, kv_head, first_k, k_len, k_length, dk_strides, SHAPE.D, SHAPE.PADDED_D,
            SHAPE.BLOCK_N, True,
            SHAPE.HAS_LENGTHS,
        )  # fmt: skip
        write_gradients(
            dv, dv_ptr, amplification, batch, kv_head, first_k, k_len, k_length, dv_strides, SHAPE.DV,
            SHAPE.PADDED_DV, SHAPE.BLOCK_N,
            SHAPE.DROPOUT, SHAPE.HAS_LENGTHS,
        )  # fmt: skip

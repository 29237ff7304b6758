"""The backward kernels: dQ and delta over the rows of the mask, then dK and dV over its columns.

Probabilities are recomputed from the scores and the forward's lse. Each output is written by one program, so there are
no atomics and the bits are the same at every run.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.portable.arithmetic import product
from sparseflash.backends.triton.portable.dropout import kept_weights
from sparseflash.backends.triton.portable.fp32_split import accumulate, in_fp32, products
from sparseflash.backends.triton.portable.loads import (
    live_in_row,
    live_scores,
    load_columns,
    load_tokens,
    numbers_of_rows,
    part_pointers,
    store_tokens,
    token_numbers,
)
from sparseflash.backends.triton.portable.scores import (
    CAPPED,
    add_last_run,
    add_run_gradients,
    add_table_gradients,
    changed_scores,
    code_differences,
    entries_at,
    no_run,
    slope_gradients,
    store_bias_gradients,
)
from sparseflash.backends.triton.portable.softmax import (
    add_exactly,
    exp2_rounded,
    recomputed_weights,
    score_gradients,
)
from sparseflash.backends.triton.portable.walk import (
    ITEM,
    cut_at_length,
    first_blocks,
    listed_block,
    partial_tile,
    row_item,
    tokens_of_block,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def lse_gradients(pointers, inside, inverse, AXIS: tl.constexpr):
    """The gradients of lse of a tile's queries, along the other axis of scores; 0, not NaN, of those without keys."""
    return tl.where(inverse > 0.0, tl.expand_dims(tl.load(pointers, mask=inside, other=0.0), AXIS), 0.0)


@triton.jit
def dk_dv_step(
    dk, dv, dkey, own_sums, k_tile, v_tile, q, dout, lse2, inverse_ptr, delta, dlse_ptr, batch, head, heads,
    first_q, q_len, first_k, k_len, words_ptr, tile, seed_ptr, dropped, amplification, coordinates,
    scale, qk_scale, q_strides, dout_strides, row_stride, changes, dkey_ptr,
    D: tl.constexpr, DV: tl.constexpr, PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GATHERED: tl.constexpr, DROPOUT: tl.constexpr, KEEP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, ROWS_TMA: tl.constexpr, CHANGES: tl.constexpr, OWN: tl.constexpr,
    OWN_SUMS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of one tile of queries to dk (without the scale), dv, the gradient of a bias of keys,
    which stays 0.0 without `dkey_ptr`, and one's own sums. Scores are [keys, queries] here.
    """
    rows = token_numbers(first_q, BLOCK_M)
    batch_head = batch * heads + head
    q_tile = load_tokens(q, batch, head, first_q, q_len, q_strides, D, PADDED_D, BLOCK_M, not MASKED, TMA, PRECISION)
    # The bits of the tile mask the scores of queries past the end. Their lse2 only has to give finite exponentials,
    # which any finite maximum does (if KEEP), and +inf, for which they are 0.
    lse2_row = numbers_of_rows(
        lse2, batch_head, first_q, rows, q_len, row_stride, 0.0 if KEEP else float("inf"),
        BLOCK_M, not MASKED, ROWS_TMA,
    )  # fmt: skip
    delta_row = numbers_of_rows(delta, batch_head, first_q, rows, q_len, row_stride, 0.0, BLOCK_M, not MASKED, ROWS_TMA)
    # In full fp32 scores and dp are summed in the same order as in dq_kernel, so that dp has the same rounding errors
    # as the delta that is subtracted from it.
    scores = products(k_tile, q_tile, PRECISION, True)
    if CHANGES:
        scores, factor, own = changed_scores(
            scores, changes, scale, batch, head, first_q, first_k, q_len, k_len, BLOCK_M, BLOCK_N, CHANGES, OWN,
            MASKED, True,
        )  # fmt: skip
    inverse, dlse, live = None, None, None
    if KEEP:
        at = tl.cast(batch_head, tl.int64) * row_stride + rows
        inverse = tl.load(inverse_ptr + at, mask=rows < q_len, other=0.0)[None, :]
    if MASKED:
        patch_q = 0 if GATHERED > 0 else first_q
        live = live_scores(words_ptr, tile, patch_q, first_k, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, False, True)
    _, p = recomputed_weights(scores, live, lse2_row[None, :], inverse, qk_scale, KEEP, PRECISION)
    dout_tile = load_tokens(
        dout, batch, head, first_q, q_len, dout_strides, DV, PADDED_DV, BLOCK_M, not MASKED, TMA, PRECISION,
    )  # fmt: skip
    passed = p
    if DROPOUT:
        keep = kept_weights(
            seed_ptr, dropped, coordinates, batch_head, first_q, first_k, q_len, k_len, BLOCK_M, BLOCK_N, True
        )
        passed = tl.where(keep, p, 0.0)
    dv = accumulate(passed, dout_tile, dv, PRECISION)
    dp = products(v_tile, dout_tile, PRECISION, True)
    if DROPOUT:
        dp = tl.where(keep, dp * amplification, 0.0)
    if KEEP:
        if dlse_ptr is not None:
            dlse = lse_gradients(dlse_ptr + at, rows < q_len, inverse, 0)
    ds = score_gradients(p, dp, delta_row[None, :], dlse)
    if OWN_SUMS is not None:
        own_sums = OWN_SUMS(own_sums, ds, own[1], BLOCK_N)
    if CHANGES:
        if OWN is not None:
            ds = product(ds, own[0])
    if dkey_ptr is not None:
        dkey += tl.sum(ds, 1)
    if CAPPED & CHANGES:
        ds = ds * factor
    return accumulate(ds, q_tile, dk, PRECISION), dv, dkey, own_sums


@triton.jit
def write_gradients(
    dx, dx_ptr, factor, batch, head, first, tokens, length, strides,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TOKENS: tl.constexpr, SCALED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Writes a complete gradient, times `factor` if SCALED; if CUT, 0 for tokens at or past `length`."""
    if SCALED:
        dx = dx * factor
    if CUT:
        dx = tl.where((first + tl.arange(0, TOKENS) < length)[:, None], dx, 0.0)
    store_tokens(dx_ptr, dx.to(dx_ptr.dtype.element_ty), batch, head, first, tokens, strides, DIM, PADDED_DIM, TOKENS)


# Sizes are not specialised, so another length or number of heads does not recompile.
@triton.jit(
    do_not_specialize=[
        "lengths_stride", "dropped", "amplification", "scale", "qk_scale", "heads", "group", "q_len", "k_len",
        "col_tiles", "row_stride",
        "cap", "inverse_cap", "values_stride",
    ],
    # Of these few numbers are loaded at a time.
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
    dropped, amplification,  # if DROPOUT
    scale, qk_scale,
    heads,  # key heads
    group, q_len, k_len, col_tiles, row_stride,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    cap, inverse_cap,  # the arguments from here to own_numbers only if CHANGES: see scores.py
    slopes_ptr,  # [Hq], or None
    values_ptr,  # [Hq, C], in q's dtype: a table; or None
    until_ptr, q_codes_ptr, k_codes_ptr, values_stride,  # int32 [C], or None and int32 [Nq], [Nk]; see relative.py
    key_bias_ptr, key_bias_strides, bias_ptr, bias_strides,  # strides of all dimensions, 0 where shared; or None
    own_ptrs, own_numbers,  # the tensors of one's own function, and their strides and sizes as own.py lists them
    dkey_ptr,  # fp32 [W, group, BLOCK_N], written: the gradient of a bias of keys; or None
    own_parts,  # the same of what one's own function reads for each key; or None
    D: tl.constexpr, DV: tl.constexpr, PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GATHERED: tl.constexpr,  # as in the forward, but for a tile of queries
    HAS_LENGTHS: tl.constexpr, DROPOUT: tl.constexpr, KEEP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    ROWS_TMA: tl.constexpr, CHANGES: tl.constexpr, OWN: tl.constexpr, OWN_SUMS: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys."""
    SPLIT: tl.constexpr = BLOCK_Q // BLOCK_M
    tl.static_assert(GATHERED == 0 or SPLIT == 1, "a gathered tile is taken whole")
    item_ptr = work_ptr + tl.cast(tl.program_id(0), tl.int64) * group * ITEM
    item = tl.load(item_ptr)
    batch_head = item // col_tiles
    first_k = item % col_tiles * BLOCK_N
    batch, kv_head = batch_head // heads, batch_head % heads
    q_length, k_length = q_len, k_len
    if HAS_LENGTHS:
        q_length, k_length = tl.load(lengths_ptr + batch), tl.load(lengths_ptr + lengths_stride + batch)

    k_tile = load_tokens(k, batch, kv_head, first_k, k_len, k_strides, D, PADDED_D, BLOCK_N, False, TMA, PRECISION)
    v_tile = load_tokens(v, batch, kv_head, first_k, k_len, v_strides, DV, PADDED_DV, BLOCK_N, False, TMA, PRECISION)
    dk = tl.zeros([BLOCK_N, PADDED_D], tl.float32)
    dv = tl.zeros([BLOCK_N, PADDED_DV], tl.float32)
    changes = (
        cap, inverse_cap, slopes_ptr, values_ptr, until_ptr, q_codes_ptr, k_codes_ptr, values_stride, key_bias_ptr,
        key_bias_strides, bias_ptr, bias_strides, own_ptrs, own_numbers,
    )  # fmt: skip
    coordinates = rows_ptr, queries_ptr, groups_ptr
    dkey, own_sums = 0.0, ()
    if dkey_ptr is not None:
        dkey = tl.zeros([BLOCK_N], tl.float32)
    if OWN_SUMS is not None:
        own_sums = OWN_SUMS(None, None, None, BLOCK_N)
    for member in range(0, group):
        list_ptr = item_ptr + member * ITEM
        start, full, count = tl.load(list_ptr + 1), tl.load(list_ptr + 2), tl.load(list_ptr + 3)
        next_block, partial_block = first_blocks(list_ptr, index_ptr, start, full, BLOCK_M, GATHERED)
        partial_number = tl.load(list_ptr + 6)
        partial = count - full
        first_partial = start + full
        if HAS_LENGTHS:
            if first_k >= k_length:
                full, count = 0, 0
            # A query past the length has lse2 = +inf (inverse 0 if KEEP), so the full tile that the length cuts needs
            # no mask.
            inside, at_end, partial = cut_at_length(index_ptr, start, full, count, q_length, BLOCK_Q, BLOCK_M, GATHERED)
            full = inside + at_end
        head = kv_head * group + member
        if dkey_ptr is not None:
            dkey = tl.zeros([BLOCK_N], tl.float32)
        if OWN_SUMS is not None:
            own_sums = OWN_SUMS(None, None, None, BLOCK_N)
        for i in range(0, full * SPLIT):
            first_q = tokens_of_block(next_block, i, BLOCK_Q, BLOCK_M, GATHERED)
            next_block = listed_block(index_ptr, start, (i + 1) // SPLIT, BLOCK_M, GATHERED)
            dk, dv, dkey, own_sums = dk_dv_step(
                dk, dv, dkey, own_sums, k_tile, v_tile, q, dout, lse2, inverse_ptr, delta, dlse_ptr,
                batch, head, heads * group, first_q, q_len, first_k, k_len, words_ptr, 0, seed_ptr, dropped,
                amplification, coordinates, scale, qk_scale, q_strides, dout_strides, row_stride, changes, dkey_ptr, D,
                DV, PADDED_D, PADDED_DV, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, GATHERED, DROPOUT, KEEP, TMA, PRECISION,
                ROWS_TMA, CHANGES, OWN, OWN_SUMS, False,
            )  # fmt: skip
        if partial > 0:  # as in the forward
            next_block, next_tile = partial_block, partial_number
            for i in range(0, partial * SPLIT):
                first_q = tokens_of_block(next_block, i, BLOCK_Q, BLOCK_M, GATHERED)
                tile = next_tile
                next_block, next_tile = partial_tile(
                    index_ptr, tile_ptr, 0, 0, first_partial, (i + 1) // SPLIT, BLOCK_M, GATHERED, False
                )
                dk, dv, dkey, own_sums = dk_dv_step(
                    dk, dv, dkey, own_sums, k_tile, v_tile, q, dout, lse2, inverse_ptr, delta, dlse_ptr,
                    batch, head, heads * group, first_q, q_len, first_k, k_len, words_ptr, tile, seed_ptr, dropped,
                    amplification, coordinates, scale, qk_scale, q_strides, dout_strides, row_stride, changes, dkey_ptr,
                    D, DV, PADDED_D, PADDED_DV, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, GATHERED, DROPOUT, KEEP, TMA,
                    PRECISION, ROWS_TMA, CHANGES, OWN, OWN_SUMS, True,
                )  # fmt: skip
        place = tl.cast(tl.program_id(0), tl.int64) * group + member
        if OWN_SUMS is not None:
            store_own_sums(own_sums, own_parts, place, first_k, k_length, BLOCK_N, HAS_LENGTHS)
        if dkey_ptr is not None:
            if HAS_LENGTHS:  # a tile may be cut by the length
                dkey = tl.where(first_k + tl.arange(0, BLOCK_N) < k_length, dkey, 0.0)
            tl.store(dkey_ptr + place * BLOCK_N + tl.arange(0, BLOCK_N), dkey)

    if parts_ptr is None:
        write_key_gradients(
            dk, dv, dk_ptr, dv_ptr, scale, amplification, batch, kv_head, first_k, k_len, k_length, dk_strides,
            dv_strides, D, DV, PADDED_D, PADDED_DV, BLOCK_N, DROPOUT, HAS_LENGTHS,
        )  # fmt: skip
    else:
        part = tl.load(item_ptr + 7)
        SIZE: tl.constexpr = BLOCK_N * (PADDED_D + PADDED_DV)
        if part > 0:
            tl.store(part_pointers(parts_ptr, part - 1, SIZE, 0, BLOCK_N, PADDED_D), dk)
            tl.store(part_pointers(parts_ptr, part - 1, SIZE, BLOCK_N * PADDED_D, BLOCK_N, PADDED_DV), dv)
        else:
            write_key_gradients(
                dk, dv, dk_ptr, dv_ptr, scale, amplification, batch, kv_head, first_k, k_len, k_length, dk_strides,
                dv_strides, D, DV, PADDED_D, PADDED_DV, BLOCK_N, DROPOUT, HAS_LENGTHS,
            )  # fmt: skip


@triton.jit
def write_key_gradients(
    dk, dv, dk_ptr, dv_ptr, scale, amplification, batch, kv_head, first_k, k_len, k_length, dk_strides, dv_strides,
    D: tl.constexpr, DV: tl.constexpr, PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr, TOKENS: tl.constexpr,
    DROPOUT: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Writes complete dK and dV; if CUT, 0 for keys at or past the length."""
    write_gradients(
        dk, dk_ptr, scale, batch, kv_head, first_k, k_len, k_length, dk_strides, D, PADDED_D, TOKENS, True, CUT
    )
    write_gradients(
        dv, dv_ptr, amplification, batch, kv_head, first_k, k_len, k_length, dv_strides, DV, PADDED_DV, TOKENS,
        DROPOUT, CUT,
    )  # fmt: skip


@triton.jit
def row_step(
    q_tile, dout_tile, k, v, lse2, inverse, words_ptr, tile, seed_ptr, dropped, amplification, coordinates,
    batch_head, batch, head, kv_head, first_q, first_k, q_len, k_len, k_length, scale, qk_scale, k_strides, v_strides,
    changes, D: tl.constexpr, DV: tl.constexpr, PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GATHERED: tl.constexpr, HAS_LENGTHS: tl.constexpr, DROPOUT: tl.constexpr, KEEP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, CHANGES: tl.constexpr, OWN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys in the backward over rows: `(keys, exponentials, weights, gradients of the weights, derivative
    of the scores' cap, what one's own function returned)`.
    """
    k_tile = load_tokens(
        k, batch, kv_head, first_k, k_len, k_strides, D, PADDED_D, BLOCK_N, not MASKED, TMA, PRECISION,
    )  # fmt: skip
    v_tile = load_tokens(
        v, batch, kv_head, first_k, k_len, v_strides, DV, PADDED_DV, BLOCK_N, not MASKED, TMA, PRECISION,
    )  # fmt: skip
    scores = products(q_tile, k_tile, PRECISION)
    factor, own = 1.0, (1.0, ())
    if CHANGES:
        scores, factor, own = changed_scores(
            scores, changes, scale, batch, head, first_q, first_k, q_len, k_len, BLOCK_M, BLOCK_N, CHANGES, OWN,
            MASKED, False,
        )  # fmt: skip
    live, inverses = None, None
    if MASKED:
        live = live_in_row(
            words_ptr, tile, first_q, first_k, k_length, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, GATHERED, HAS_LENGTHS,
        )  # fmt: skip
    if KEEP:
        inverses = inverse[:, None]
    exps, p = recomputed_weights(scores, live, lse2[:, None], inverses, qk_scale, KEEP, PRECISION)
    dp = products(dout_tile, v_tile, PRECISION)
    if DROPOUT:
        keep = kept_weights(
            seed_ptr, dropped, coordinates, batch_head, first_q, first_k, q_len, k_len, BLOCK_M, BLOCK_N, False
        )
        dp = tl.where(keep, dp * amplification, 0.0)
    return k_tile, exps, p, dp, factor, own


@triton.jit
def learned_step(
    ds, factor, table_sums, dbias_ptr, dtable_ptr, buckets_ptr, table_size, changes, batch_head, first_q, first_k,
    q_len, k_len, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of a bias and a table by one tile: `(those of the products without the scale, table_sums)`.

    See add_run_gradients for `table_sums`.
    """
    rows, keys = token_numbers(first_q, BLOCK_M), token_numbers(first_k, BLOCK_N)
    if dbias_ptr is not None:
        store_bias_gradients(ds, dbias_ptr, batch_head, rows, keys, q_len, k_len)
    if dtable_ptr is not None:
        own = dtable_ptr + tl.cast(tl.program_id(0), tl.int64) * table_size
        if changes[4] is not None:
            table_sums = add_run_gradients(
                table_sums, ds, own, buckets_ptr, changes[4], first_q, first_k, rows, keys, q_len, k_len, BLOCK_M,
                BLOCK_N, CHANGES,
            )  # fmt: skip
        else:
            at = code_differences(changes[4], changes[5], changes[6], rows, keys, q_len, k_len, False)
            add_table_gradients(ds, own, entries_at(buckets_ptr, at, CHANGES), None)
    if CAPPED & CHANGES:
        ds = ds * factor
    return ds, table_sums


@triton.jit
def own_step(
    ds, own, own_sums, own_parts, own_numbers, batch_head, first_q, first_k, q_len, k_len,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OWN_SUMS: tl.constexpr, OWN_STORES: tl.constexpr,
):  # fmt: skip
    """The gradients of one's own function by one tile: `(those of the scores before it, the sums of its queries)`."""
    if OWN_SUMS is not None:
        own_sums = OWN_SUMS(own_sums, ds, own[1], BLOCK_M)
    if OWN_STORES is not None:
        rows, keys = token_numbers(first_q, BLOCK_M), token_numbers(first_k, BLOCK_N)
        OWN_STORES(ds, own[1], own_parts, own_numbers, batch_head, rows, keys, q_len, k_len)
    return product(ds, own[0]), own_sums


@triton.jit
def dq_step(
    dq, dslopes, own_sums, table_sums, k_tile, p, dp, delta, dlse, factor, own, dslopes_ptr, dbias_ptr, dtable_ptr,
    buckets_ptr, table_size, own_parts, changes, batch_head, first_q, first_k, q_len, k_len,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, CHANGES: tl.constexpr, OWN: tl.constexpr,
    OWN_SUMS: tl.constexpr, OWN_STORES: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of one tile of keys, from what `row_step` returned, to dq (without the scale) and to the
    gradients of what changes of scores learn: `(dq, dslopes, own_sums, table_sums)`.
    """
    ds = score_gradients(p, dp, delta[:, None], dlse)
    if OWN is not None:
        ds, own_sums = own_step(
            ds, own, own_sums, own_parts, changes[13], batch_head, first_q, first_k, q_len, k_len, BLOCK_M, BLOCK_N,
            OWN_SUMS, OWN_STORES,
        )  # fmt: skip
    if dslopes_ptr is not None:
        rows, keys = token_numbers(first_q, BLOCK_M), token_numbers(first_k, BLOCK_N)
        dslopes += slope_gradients(ds, rows, keys, q_len, k_len, CHANGES)
    if CHANGES:
        ds, table_sums = learned_step(
            ds, factor, table_sums, dbias_ptr, dtable_ptr, buckets_ptr, table_size, changes, batch_head, first_q,
            first_k, q_len, k_len, BLOCK_M, BLOCK_N, CHANGES,
        )  # fmt: skip
    return accumulate(ds, k_tile, dq, PRECISION), dslopes, own_sums, table_sums


@triton.jit
def store_own_sums(own_sums, own_parts, place, first, length, TOKENS: tl.constexpr, CUT: tl.constexpr):
    """Writes the sums of one's own function for a tile of tokens; if CUT, 0 at or past `length`."""
    at = tl.arange(0, TOKENS)
    for number in tl.static_range(len(own_sums)):
        found = own_sums[number]
        if CUT:
            found = tl.where(first + at < length, found, 0.0)
        tl.store(own_parts[number] + place * TOKENS + at, found)


@triton.jit
def means_step(delta, weight, lost, exps, p, dp, estimate):
    """Adds one tile of keys to the sums from which `write_means` computes delta; estimate: rowsum(out * dout)."""
    weight, lost = add_exactly(weight, lost, tl.sum(exps, 1))
    return delta + tl.sum(p * (dp - estimate[:, None]), 1), weight, lost


@triton.jit
def means_of_sink(delta, weight, estimate, inverse, maximum, sink_ptr, head):
    """`means_step` for the sink, a key whose weight has the gradient 0."""
    exps = exp2_rounded((tl.load(sink_ptr + head).to(tl.float32) - maximum) * LOG2E)
    return delta - exps * inverse * estimate, weight + exps


@triton.jit
def write_means(delta, weight, estimate, inverse, delta_ptr, own_inverse_ptr, at, inside):
    """Writes delta and the inverse sum of exponentials of queries all of whose keys have been added."""
    weight = tl.where((inverse > 0.0) & (weight > 0.0), weight, 1.0)
    tl.store(delta_ptr + at, estimate + tl.div_rn(delta, tl.where(inverse > 0.0, weight * inverse, 1.0)), mask=inside)
    own_inverse = tl.where(inverse > 0.0, tl.div_rn(tl.full(weight.shape, 1.0, tl.float32), weight), 0.0)
    tl.store(own_inverse_ptr + at, own_inverse, mask=inside)


@triton.jit(
    do_not_specialize=[
        "lengths_stride", "dropped", "amplification", "scale", "qk_scale", "heads", "group", "q_len", "k_len",
        "row_tiles", "row_stride",
        "cap", "inverse_cap", "values_stride", "table_size",
    ],
    # Of these few numbers are loaded at a time.
    do_not_specialize_on_alignment=["lengths_ptr", "seed_ptr", "rows_ptr", "queries_ptr", "groups_ptr"],
)  # fmt: skip
def dq_kernel(
    q, k, v,  # pointers, or descriptors if TMA
    dout_ptr, out_ptr,  # [B, Hq, Nq, DV]; out is the forward's
    lse_ptr, dlse_ptr,  # [B, Hq, Nq] contiguous: the forward's lse, and its gradient or None
    lse2_ptr, inverse_ptr, delta_ptr,  # [B, Hq, row_stride]; if KEEP, the forward's maximum and inverse, and delta
    dq_ptr,  # [B, Hq, Nq, D], written unless DELTA
    own_inverse_ptr,  # [B, Hq, row_stride], written if DELTA
    work_ptr,  # as in the forward
    parts_ptr,  # fp32 [parts, BLOCK_M * PADDED_D], written: dq, or if DELTA [parts, BLOCK_M * 3]; or None
    index_ptr, tile_ptr, words_ptr, lengths_ptr, lengths_stride,
    seed_ptr, rows_ptr, queries_ptr, groups_ptr,  # if DROPOUT: see dropout.py; int32 [B, Hq], [Nq], [groups], or None
    dropped, amplification,  # if DROPOUT
    scale, qk_scale, heads, group, q_len, k_len, row_tiles, row_stride,
    q_strides, k_strides, v_strides, dout_strides, out_strides, dq_strides,
    cap, inverse_cap,  # the arguments from here to own_numbers only if CHANGES: see scores.py
    slopes_ptr,  # [Hq], or None
    values_ptr,  # [Hq, C], in q's dtype: a table; or None
    until_ptr, q_codes_ptr, k_codes_ptr, values_stride,  # int32 [C], or None and int32 [Nq], [Nk]; see relative.py
    key_bias_ptr, key_bias_strides, bias_ptr, bias_strides,  # strides of all dimensions, 0 where shared; or None
    own_ptrs, own_numbers,  # the tensors of one's own function, and their strides and sizes as own.py lists them
    sink_ptr,  # [Hq], or None; read if DELTA
    dslopes_ptr,  # fp32 [W, BLOCK_M], written: the gradient of the slope by each query; or None, as those below
    dbias_ptr,  # [B, Hq, Nq, Nk] contiguous, written for live tiles
    dtable_ptr, buckets_ptr, table_size,  # fp32 [W, R], to which is added, and int32 [C]: the bucket of each code
    own_parts,  # the gradients of what one's own function reads: as dslopes_ptr, then as dbias_ptr, then as dtable_ptr
    D: tl.constexpr, DV: tl.constexpr, PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GATHERED: tl.constexpr,  # as in the forward
    HAS_LENGTHS: tl.constexpr, DROPOUT: tl.constexpr, KEEP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    DELTA: tl.constexpr, CHANGES: tl.constexpr, OWN: tl.constexpr, OWN_SUMS: tl.constexpr, OWN_STORES: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries, and lse2 and delta for dk_dv_kernel; if DELTA, only delta and the inverse sums.

    lse2 is the lse in base 2, and delta = rowsum(p * dp) - dlse. Queries without keys get +inf and 0, so that p =
    exp2(s - inf) = 0 without a check.

    If few keys have nearly all the weight, the gradient of a score is the difference of two nearly equal numbers, dp
    and delta. In half precision rowsum(out * dout) - dlse is as good a delta as any. In fp32 its rounding would be an
    error that a plain implementation does not have. So in fp32 a pass with DELTA comes first, and delta is the mean,
    under the same p, of the same dp from which it will be subtracted, accumulated as its difference from rowsum(out *
    dout); dlse is added after the subtraction. That pass also recomputes the inverse sum of the exponentials, from the
    scores as the backward computes them, with a Kahan sum over the tiles, because its rounding error would be common to
    all gradients of the row.
    """
    SPLIT: tl.constexpr = BLOCK_K // BLOCK_N
    tl.static_assert(GATHERED == 0 or SPLIT == 1, "a gathered tile is taken whole")
    item_ptr = work_ptr + tl.cast(tl.program_id(0), tl.int64) * ITEM
    place, lists, firsts, live_tokens = row_item(
        item_ptr, index_ptr, lengths_ptr, lengths_stride, heads, group, row_tiles, q_len, k_len,
        BLOCK_K, BLOCK_M, BLOCK_N, GATHERED, HAS_LENGTHS,
    )  # fmt: skip
    batch_head, batch, head, kv_head, first_q = place
    start, full, at_end, partial, first_partial = lists
    next_block, partial_block, partial_number = firsts
    q_length, k_length = live_tokens

    rows = first_q + tl.arange(0, BLOCK_M)
    row = tl.cast(batch_head, tl.int64) * row_stride
    dlse, inverse = None, None
    # A descriptor load blocks where it is issued, so pointer loads are issued before it and arrive meanwhile.
    dout_tile = load_tokens(
        dout_ptr, batch, head, first_q, q_len, dout_strides, DV, PADDED_DV, BLOCK_M, False, False, PRECISION,
    )  # fmt: skip
    if DELTA or not KEEP:
        out_tile = load_columns(
            out_ptr, batch, head, first_q, q_len, out_strides, 0, DV, PADDED_DV, BLOCK_M, False, False,
        )  # fmt: skip
    if KEEP:
        lse2 = tl.load(lse2_ptr + row + rows, mask=rows < q_len, other=0.0)
        inverse = tl.load(inverse_ptr + row + rows, mask=rows < q_len, other=0.0)
        if dlse_ptr is not None:
            dlse = lse_gradients(dlse_ptr + row + rows, rows < q_len, inverse[:, None], 1)
    else:
        at_q = tl.cast(batch_head, tl.int64) * q_len + rows
        lse = tl.load(lse_ptr + at_q, mask=rows < q_len, other=float("-inf"))
        if dlse_ptr is not None:
            own_dlse = tl.load(dlse_ptr + at_q, mask=rows < q_len, other=0.0)
    q_tile = load_tokens(q, batch, head, first_q, q_len, q_strides, D, PADDED_D, BLOCK_M, False, TMA, PRECISION)
    if DELTA or not KEEP:
        estimate = tl.sum(out_tile.to(tl.float32) * in_fp32(dout_tile, PRECISION), 1)
    if DELTA:
        delta = tl.zeros([BLOCK_M], tl.float32)
        weight, lost = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    elif KEEP:
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
    dq = tl.zeros([BLOCK_M, PADDED_D], tl.float32)
    changes = (
        cap, inverse_cap, slopes_ptr, values_ptr, until_ptr, q_codes_ptr, k_codes_ptr, values_stride, key_bias_ptr,
        key_bias_strides, bias_ptr, bias_strides, own_ptrs, own_numbers,
    )  # fmt: skip
    coordinates = rows_ptr, queries_ptr, groups_ptr
    dslopes, own_sums, table_sums = (), (), ()
    if dslopes_ptr is not None:
        dslopes = tl.zeros([BLOCK_M], tl.float32)
    if OWN_SUMS is not None:
        own_sums = OWN_SUMS(None, None, None, BLOCK_M)
    if dtable_ptr is not None:
        table_sums = no_run(BLOCK_M)

    for i in range(0, full * SPLIT):
        first_k = tokens_of_block(next_block, i, BLOCK_K, BLOCK_N, GATHERED)
        next_block = listed_block(index_ptr, start, (i + 1) // SPLIT, BLOCK_N, GATHERED)
        k_tile, exps, p, dp, factor, own = row_step(
            q_tile, dout_tile, k, v, lse2, inverse, words_ptr, 0, seed_ptr, dropped, amplification, coordinates,
            batch_head, batch, head, kv_head, first_q, first_k, q_len, k_len, k_length, scale, qk_scale, k_strides,
            v_strides, changes, D, DV, PADDED_D, PADDED_DV, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, GATHERED, HAS_LENGTHS,
            DROPOUT, KEEP, TMA, PRECISION, CHANGES, OWN, False,
        )  # fmt: skip
        if DELTA:
            delta, weight, lost = means_step(delta, weight, lost, exps, p, dp, estimate)
        else:
            dq, dslopes, own_sums, table_sums = dq_step(
                dq, dslopes, own_sums, table_sums, k_tile, p, dp, delta, dlse, factor, own, dslopes_ptr, dbias_ptr,
                dtable_ptr, buckets_ptr, table_size, own_parts, changes, batch_head, first_q, first_k, q_len, k_len,
                BLOCK_M, BLOCK_N, PRECISION, CHANGES, OWN, OWN_SUMS, OWN_STORES,
            )  # fmt: skip

    if at_end + partial > 0:  # as in the forward
        next_block, next_tile = partial_block, partial_number
        if HAS_LENGTHS:
            if at_end > 0:
                next_block, next_tile = partial_tile(
                    index_ptr, tile_ptr, start + full, at_end, first_partial, 0, BLOCK_N, GATHERED, True
                )
        for i in range(0, (at_end + partial) * SPLIT):
            first_k = tokens_of_block(next_block, i, BLOCK_K, BLOCK_N, GATHERED)
            tile = next_tile
            next_block, next_tile = partial_tile(
                index_ptr, tile_ptr, start + full, at_end, first_partial, (i + 1) // SPLIT, BLOCK_N, GATHERED,
                HAS_LENGTHS,
            )  # fmt: skip
            k_tile, exps, p, dp, factor, own = row_step(
                q_tile, dout_tile, k, v, lse2, inverse, words_ptr, tile, seed_ptr, dropped, amplification,
                coordinates, batch_head, batch, head, kv_head, first_q, first_k, q_len, k_len, k_length, scale,
                qk_scale, k_strides, v_strides, changes, D, DV, PADDED_D, PADDED_DV, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N,
                GATHERED, HAS_LENGTHS, DROPOUT, KEEP, TMA, PRECISION, CHANGES, OWN, True,
            )  # fmt: skip
            if DELTA:
                delta, weight, lost = means_step(delta, weight, lost, exps, p, dp, estimate)
            else:
                dq, dslopes, own_sums, table_sums = dq_step(
                    dq, dslopes, own_sums, table_sums, k_tile, p, dp, delta, dlse, factor, own, dslopes_ptr, dbias_ptr,
                    dtable_ptr, buckets_ptr, table_size, own_parts, changes, batch_head, first_q, first_k, q_len, k_len,
                    BLOCK_M, BLOCK_N, PRECISION, CHANGES, OWN, OWN_SUMS, OWN_STORES,
                )  # fmt: skip

    if OWN_SUMS is not None:
        store_own_sums(own_sums, own_parts, tl.cast(tl.program_id(0), tl.int64), 0, 0, BLOCK_M, False)
    if dtable_ptr is not None:
        if until_ptr is not None:
            own_table = dtable_ptr + tl.cast(tl.program_id(0), tl.int64) * table_size
            add_last_run(table_sums, own_table)
    if dslopes_ptr is not None:
        place = tl.cast(tl.program_id(0), tl.int64) * BLOCK_M
        tl.store(dslopes_ptr + place + tl.arange(0, BLOCK_M), dslopes)
    at = row + rows
    if parts_ptr is None:
        if DELTA:
            if sink_ptr is not None:
                delta, weight = means_of_sink(delta, weight, estimate, inverse, lse2, sink_ptr, head)
            write_means(delta, weight, estimate, inverse, delta_ptr, own_inverse_ptr, at, rows < q_len)
        else:
            write_gradients(
                dq, dq_ptr, scale, batch, head, first_q, q_len, q_length, dq_strides, D, PADDED_D, BLOCK_M, True, False
            )
    else:
        part = tl.load(item_ptr + 7)
        SIZE: tl.constexpr = BLOCK_M * (3 if DELTA else PADDED_D)
        if part > 0:
            if DELTA:
                tl.store(part_pointers(parts_ptr, part - 1, SIZE, 0, BLOCK_M, 1), delta[:, None])
                tl.store(part_pointers(parts_ptr, part - 1, SIZE, BLOCK_M, BLOCK_M, 1), weight[:, None])
                tl.store(part_pointers(parts_ptr, part - 1, SIZE, 2 * BLOCK_M, BLOCK_M, 1), estimate[:, None])
            else:
                tl.store(part_pointers(parts_ptr, part - 1, SIZE, 0, BLOCK_M, PADDED_D), dq)
        else:
            if DELTA:
                if sink_ptr is not None:
                    delta, weight = means_of_sink(delta, weight, estimate, inverse, lse2, sink_ptr, head)
                write_means(delta, weight, estimate, inverse, delta_ptr, own_inverse_ptr, at, rows < q_len)
            else:
                write_gradients(
                    dq, dq_ptr, scale, batch, head, first_q, q_len, q_length, dq_strides, D, PADDED_D, BLOCK_M,
                    True, False,
                )  # fmt: skip

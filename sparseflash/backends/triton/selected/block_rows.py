"""Attention to chosen blocks by queries: a program has the heads of a query that share a choice."""

import triton
import triton.language as tl

from sparseflash.backends.triton.device_functions.softmax import (
    LN2,
    LOG2E,
    recomputed_weights,
    score_gradients,
    softmax_step,
)
from sparseflash.backends.triton.selected.loads import columns, store_columns, token_offsets
from sparseflash.backends.triton.selected.pieces import (
    load_pieces,
    plus_products,
    scores_of,
    store_pieces,
    zeros_in_pieces,
)

SIZES = ["q_len", "k_len", "shift", "heads", "repeats", "group", "choices"]


@triton.jit
def _query_of_program(q_len, heads, group, ROWS: tl.constexpr):
    """`(list, batch, head that chooses, query, head of its group in each row, whether the row has a head)`."""
    row = tl.program_id(0).to(tl.int64)
    pair, query = row // q_len, row % q_len
    in_group = tl.arange(0, ROWS).to(tl.int64)  # heads may lie 2^31 numbers apart
    return row, pair // heads, pair % heads, query, in_group, in_group < group


@triton.jit
def _keys_of_step(chosen_ptr, block, i, steps, k_len, BLOCK_N: tl.constexpr, SPAN: tl.constexpr):
    """`(keys of step i, which of them exist, block of the next step)`. A block takes SPAN // BLOCK_N steps."""
    PARTS: tl.constexpr = SPAN // BLOCK_N
    following = tl.load(chosen_ptr + (i + 1) // PARTS, mask=i + 1 < steps, other=0)
    key = block * SPAN + i % PARTS * BLOCK_N + tl.arange(0, BLOCK_N)
    return key, key < k_len, following


@triton.jit(do_not_specialize=[*SIZES, "qk_scale"])
def rows_forward_kernel(
    q_ptr, k_ptr, v_ptr,  # [B, Hq, Nq, D], [B, Hkv, Nk, D], [B, Hkv, Nk, DV]
    chosen_ptr, counts_ptr,  # int32 [pairs, queries, choices], of which the first `count` are blocks
    out_ptr, lse_ptr,  # [B, Hq, Nq, DV], fp32 [B, Hq, Nq] contiguous; written
    q_len, k_len, shift, heads, repeats, group, choices, qk_scale,
    strides,  # of batch, head that chooses, token and head of its group (q, out); of batch, head and token (k, v)
    SHAPE: tl.constexpr, SPAN: tl.constexpr, WHOLE: tl.constexpr,  # whether the last block has SPAN keys
):  # fmt: skip
    """Computes out and lse of one query."""
    ROWS: tl.constexpr = SHAPE.ROWS
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    PADDED_DV: tl.constexpr = SHAPE.PADDED_DV
    PRECISION: tl.constexpr = SHAPE.PRECISION
    PARTS: tl.constexpr = SPAN // BLOCK_N
    q_strides, out_strides, k_strides, v_strides = strides
    row, batch, head, query, in_group, inside = _query_of_program(q_len, heads, group, ROWS)
    q_ptr += batch * q_strides[0] + head * q_strides[1] + query * q_strides[2]
    q_low, q_high = load_pieces(q_ptr, in_group * q_strides[3], inside, SHAPE)
    k_ptr += batch * k_strides[0] + head // repeats * k_strides[1]
    v_ptr += batch * v_strides[0] + head // repeats * v_strides[1]
    position = query + shift
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DV], tl.float32)
    count = tl.load(counts_ptr + row)
    chosen_ptr += row * choices
    block = tl.load(chosen_ptr, mask=count > 0, other=0)
    for i in range(0, count * PARTS):
        key, live, block = _keys_of_step(chosen_ptr, block, i, count * PARTS, k_len, BLOCK_N, SPAN)
        loaded = None if WHOLE else live
        scores, _, _ = scores_of(
            q_low, q_high, k_ptr, token_offsets(key, live, k_strides[2], SHAPE.FAR), loaded, SHAPE
        )  # fmt: skip
        if SHAPE.CAUSAL:
            live = live & (key <= position)
        p, alpha, m_i, l_i = softmax_step(scores, live[None, :], m_i, l_i, qk_scale, False, PRECISION, False)
        v_offsets = token_offsets(key, key < k_len, v_strides[2], SHAPE.FAR)
        values = columns(v_ptr, v_offsets, loaded, 0, SHAPE.DV, PADDED_DV)
        acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision=PRECISION)
    empty = l_i == 0.0
    total = tl.where(empty, 1.0, l_i)
    out = tl.where(empty[:, None], 0.0, acc / total[:, None])
    out_ptr += batch * out_strides[0] + head * out_strides[1] + query * out_strides[2]
    store_columns(out_ptr, out, in_group * out_strides[3], inside, 0, SHAPE.DV, PADDED_DV)
    lse = tl.where(empty, float("-inf"), (m_i + tl.log2(total)) * LN2)
    tl.store(lse_ptr + ((batch * heads + head) * group + in_group) * q_len + query, lse, mask=inside)


@triton.jit(do_not_specialize=[*SIZES, "scale", "qk_scale"])
def rows_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, out_ptr, chosen_ptr, counts_ptr,  # as in rows_forward_kernel
    lse_ptr, dlse_ptr,  # [B, Hq, Nq] contiguous; dlse may be None
    dq_ptr,  # [B, Hq, Nq, D], written
    lse2_ptr, delta_ptr,  # fp32 [B, Hq, Nq], written: what the gradients of keys need
    q_len, k_len, shift, heads, repeats, group, choices, scale, qk_scale,
    strides,  # of q, dout, out, dq, k and v: see rows_forward_kernel
    SHAPE: tl.constexpr, SPAN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Computes dq of one query. lse2: lse in base 2, inf without a key. delta: the sum of dout * out, less dlse."""
    ROWS: tl.constexpr = SHAPE.ROWS
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    PADDED_DV: tl.constexpr = SHAPE.PADDED_DV
    PRECISION: tl.constexpr = SHAPE.PRECISION
    PARTS: tl.constexpr = SPAN // BLOCK_N
    q_strides, dout_strides, out_strides, dq_strides, k_strides, v_strides = strides
    row, batch, head, query, in_group, inside = _query_of_program(q_len, heads, group, ROWS)
    q_ptr += batch * q_strides[0] + head * q_strides[1] + query * q_strides[2]
    q_low, q_high = load_pieces(q_ptr, in_group * q_strides[3], inside, SHAPE)
    dout_ptr += batch * dout_strides[0] + head * dout_strides[1] + query * dout_strides[2]
    dout = columns(dout_ptr, in_group * dout_strides[3], inside, 0, SHAPE.DV, PADDED_DV)
    out_ptr += batch * out_strides[0] + head * out_strides[1] + query * out_strides[2]
    out = columns(out_ptr, in_group * out_strides[3], inside, 0, SHAPE.DV, PADDED_DV)
    at = ((batch * heads + head) * group + in_group) * q_len + query
    lse = tl.load(lse_ptr + at, mask=inside, other=float("-inf"))
    empty = lse == float("-inf")
    lse2 = tl.where(empty, float("inf"), lse * LOG2E)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at, mask=inside, other=0.0)
    delta = tl.where(empty, 0.0, delta)
    tl.store(lse2_ptr + at, lse2, mask=inside)
    tl.store(delta_ptr + at, delta, mask=inside)
    k_ptr += batch * k_strides[0] + head // repeats * k_strides[1]
    v_ptr += batch * v_strides[0] + head // repeats * v_strides[1]
    position = query + shift
    dq_low, dq_high = zeros_in_pieces(ROWS, SHAPE)
    count = tl.load(counts_ptr + row)
    chosen_ptr += row * choices
    block = tl.load(chosen_ptr, mask=count > 0, other=0)
    for i in range(0, count * PARTS):
        key, live, block = _keys_of_step(chosen_ptr, block, i, count * PARTS, k_len, BLOCK_N, SPAN)
        loaded = None if WHOLE else live
        v_offsets = token_offsets(key, live, v_strides[2], SHAPE.FAR)
        scores, k_low, k_high = scores_of(
            q_low, q_high, k_ptr, token_offsets(key, live, k_strides[2], SHAPE.FAR), loaded, SHAPE
        )  # fmt: skip
        if SHAPE.CAUSAL:
            live = live & (key <= position)
        _, p = recomputed_weights(
            scores, live[None, :], lse2[:, None], 0.0, qk_scale, False, PRECISION, False
        )  # fmt: skip
        v = columns(v_ptr, v_offsets, loaded, 0, SHAPE.DV, PADDED_DV)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        ds = score_gradients(p, dp, delta[:, None], None).to(k_low.dtype)
        dq_low, dq_high = plus_products(dq_low, dq_high, ds, k_low, k_high, SHAPE)
    dq_ptr += batch * dq_strides[0] + head * dq_strides[1] + query * dq_strides[2]
    store_pieces(dq_ptr, dq_low * scale, dq_high * scale, in_group * dq_strides[3], inside, SHAPE)

"""Attention to chosen blocks, the backward: a block of keys gathers all queries that have chosen it.

dk and dv of a block are sums over its queries in ascending order. dq of a query is first written for each of its blocks
alone; then the blocks are added, in the order of the query's list.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.device_functions.softmax import LOG2E, recomputed_weights, score_gradients
from sparseflash.backends.triton.selected.block_forward import (
    SIZES,
    entries_at,
    item_of_program,
    keys_of_block,
    rows_of_entries,
)
from sparseflash.backends.triton.selected.forward import queries_of
from sparseflash.backends.triton.selected.loads import columns, store_columns, token_offsets


@triton.jit(do_not_specialize=["q_len", "rows"])
def delta_kernel(
    dout_ptr, out_ptr,  # [B, Hq, Nq, DV]
    lse_ptr, dlse_ptr,  # [B, Hq, Nq] contiguous; dlse may be None
    lse2_ptr, delta_ptr,  # fp32 [B, Hq, Nq], written
    q_len, heads, strides, DV: tl.constexpr, PADDED_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes lse in base 2, inf for rows without a key so that weights are 0, and the sum of dout * out, less dlse."""
    dout_strides, out_strides = strides
    tiles = tl.cdiv(q_len, ROWS)
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    query = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    is_row, wide = query < q_len, query.to(tl.int64)
    batch, head = pair // heads, pair % heads
    dout = columns(
        dout_ptr + batch * dout_strides[0] + head * dout_strides[1], wide * dout_strides[2], is_row, 0, DV, PADDED_DV
    )  # fmt: skip
    out = columns(
        out_ptr + batch * out_strides[0] + head * out_strides[1], wide * out_strides[2], is_row, 0, DV, PADDED_DV
    )  # fmt: skip
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + pair * q_len + query, mask=is_row, other=0.0)
    lse = tl.load(lse_ptr + pair * q_len + query, mask=is_row, other=float("-inf"))
    empty = lse == float("-inf")
    tl.store(lse2_ptr + pair * q_len + query, tl.where(empty, float("inf"), lse * LOG2E), mask=is_row)
    tl.store(delta_ptr + pair * q_len + query, tl.where(empty, 0.0, delta), mask=is_row)


@triton.jit
def _keys(k_ptr, offsets, live, SHAPE: tl.constexpr):
    low = columns(k_ptr, offsets, live, 0, SHAPE.LOW, SHAPE.PADDED_LOW)
    high = low
    if SHAPE.HIGH > 0:
        high = columns(k_ptr, offsets, live, SHAPE.PADDED_LOW, SHAPE.HIGH, SHAPE.PADDED_HIGH)
    return low, high


@triton.jit
def _statistics(lse2_ptr, delta_ptr, offsets, inside):
    """`(lse in base 2, delta)` of rows, as `delta_kernel` writes them."""
    if inside is None:
        lse2, delta = tl.load(lse2_ptr + offsets), tl.load(delta_ptr + offsets)
    else:
        lse2 = tl.load(lse2_ptr + offsets, mask=inside, other=float("inf"))
        delta = tl.load(delta_ptr + offsets, mask=inside, other=0.0)
    return lse2, delta


@triton.jit
def _with_queries(
    dk_low, dk_high, dv, k_low, k_high, v, q_ptr, dout_ptr, lse2_ptr, delta_ptr, entry, key, is_key, q_len, shift,
    choices, group, qk_scale, q_strides, dout_strides, SHAPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sums of a tile of keys, and of the queries of some entries. Unless MASKED, all of these see all keys."""
    PRECISION: tl.constexpr = SHAPE.PRECISION
    query, _, in_group, inside = rows_of_entries(entry, choices, group, SHAPE)
    loaded = inside if MASKED or SHAPE.PADDED else None
    q_low, q_high = queries_of(q_ptr, query * q_strides[2] + in_group * q_strides[1], loaded, SHAPE)
    dout = columns(
        dout_ptr, query * dout_strides[2] + in_group * dout_strides[1], loaded, 0, SHAPE.DV, SHAPE.PADDED_DV
    )  # fmt: skip
    lse2, delta = _statistics(lse2_ptr, delta_ptr, in_group * q_len + query, loaded)
    scores = tl.dot(k_low, q_low.T, input_precision=PRECISION)
    if SHAPE.HIGH > 0:
        scores = tl.dot(k_high, q_high.T, scores, input_precision=PRECISION)
    live = None
    if MASKED:
        live = tl.broadcast_to(is_key[:, None], scores.shape)
        if SHAPE.CAUSAL:
            live = live & (key[:, None] <= (query + shift)[None, :])
    _, p = recomputed_weights(scores, live, lse2[None, :], 0.0, qk_scale, False, PRECISION, False)
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
    dp = tl.dot(v, dout.T, input_precision=PRECISION)
    ds = score_gradients(p, dp, delta[None, :], None).to(q_low.dtype)
    dk_low = tl.dot(ds, q_low, dk_low, input_precision=PRECISION)
    if SHAPE.HIGH > 0:
        dk_high = tl.dot(ds, q_high, dk_high, input_precision=PRECISION)
    return dk_low, dk_high, dv


@triton.jit(do_not_specialize=[*SIZES, "scale", "qk_scale"])
def block_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, entries_ptr, ends_ptr,
    dk_ptr, dv_ptr,  # [B, heads, Nk, D] and [B, heads, Nk, DV] contiguous, written
    q_len, k_len, shift, heads, repeats, group, choices, blocks, span, first_pair, first, scale, qk_scale,
    strides,  # of batch, head and token, of q, k, v and dout
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of BLOCK_N keys."""
    ROWS: tl.constexpr = SHAPE.ROWS
    GROUP: tl.constexpr = SHAPE.GROUP
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    PADDED_LOW: tl.constexpr = SHAPE.PADDED_LOW
    PADDED_HIGH: tl.constexpr = SHAPE.PADDED_HIGH
    PADDED_DV: tl.constexpr = SHAPE.PADDED_DV
    q_strides, k_strides, v_strides, dout_strides = strides
    tiles = tl.cdiv(k_len, BLOCK_N)
    tile = tl.program_id(0) % tiles
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = pair // heads, pair % heads
    block = tile * BLOCK_N // span
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_key = key < k_len
    k_low, k_high = _keys(
        k_ptr + batch * k_strides[0] + head // repeats * k_strides[1],
        token_offsets(key, is_key, k_strides[2], SHAPE.FAR), is_key, SHAPE,
    )  # fmt: skip
    v = columns(
        v_ptr + batch * v_strides[0] + head // repeats * v_strides[1],
        token_offsets(key, is_key, v_strides[2], SHAPE.FAR), is_key, 0, SHAPE.DV, PADDED_DV,
    )  # fmt: skip
    q_ptr += batch * q_strides[0] + head * group * q_strides[1]
    dout_ptr += batch * dout_strides[0] + head * group * dout_strides[1]
    lse2_ptr += pair * group * q_len
    delta_ptr += pair * group * q_len
    at = pair * blocks + block
    begin = tl.load(ends_ptr + at - 1, mask=at > 0, other=0)
    stop = tl.load(ends_ptr + at)
    dk_low = tl.zeros([BLOCK_N, PADDED_LOW], tl.float32)
    dk_high = dk_low
    if SHAPE.HIGH > 0:
        dk_high = tl.zeros([BLOCK_N, PADDED_HIGH], tl.float32)
    dv = tl.zeros([BLOCK_N, PADDED_DV], tl.float32)
    # Only the first entries may be of queries in this block. Those, and a last tile with fewer rows, are masked.
    size = ROWS // GROUP
    masked = 0
    if SHAPE.CAUSAL:
        masked = tl.minimum(stop - begin, tile * BLOCK_N + BLOCK_N - block * span)
        masked = (masked + size - 1) // size
    elif tile * BLOCK_N + BLOCK_N > k_len:
        masked = (stop - begin + size - 1) // size
    count = (stop - begin) // size
    rest = tl.where((stop - begin > count * size) & (count >= masked), 1, 0)
    following = entries_at(entries_ptr, begin + tl.where(masked == 0, count, 0) * size, stop, GROUP, ROWS)
    for step in range(0, masked + rest):
        entry = following
        next_step = tl.where(step + 1 < masked, step + 1, count)
        following = entries_at(entries_ptr, begin + next_step * size, stop, GROUP, ROWS)
        dk_low, dk_high, dv = _with_queries(
            dk_low, dk_high, dv, k_low, k_high, v, q_ptr, dout_ptr, lse2_ptr, delta_ptr, entry, key, is_key, q_len,
            shift, choices, group, qk_scale, q_strides, dout_strides, SHAPE, MASKED=True,
        )  # fmt: skip
    # Entries are loaded one iteration ahead: addresses that were loaded in the same iteration would keep the compiler
    # from prefetching the queries.
    following = entries_at(entries_ptr, begin + masked * size, stop, GROUP, ROWS)
    for step in range(masked, count):
        entry = following
        following = entries_at(entries_ptr, begin + (step + 1) * size, stop, GROUP, ROWS)
        dk_low, dk_high, dv = _with_queries(
            dk_low, dk_high, dv, k_low, k_high, v, q_ptr, dout_ptr, lse2_ptr, delta_ptr, entry, key, is_key, q_len,
            shift, choices, group, qk_scale, q_strides, dout_strides, SHAPE, MASKED=False,
        )  # fmt: skip
    row = pair * k_len + key
    D: tl.constexpr = SHAPE.LOW + SHAPE.HIGH
    store_columns(dk_ptr, dk_low * scale, row * D, is_key, 0, SHAPE.LOW, PADDED_LOW)
    if SHAPE.HIGH > 0:
        store_columns(dk_ptr, dk_high * scale, row * D, is_key, PADDED_LOW, SHAPE.HIGH, PADDED_HIGH)
    store_columns(dv_ptr, dv, row * SHAPE.DV, is_key, 0, SHAPE.DV, PADDED_DV)


@triton.jit
def _with_keys(
    dq_low, dq_high, q_low, q_high, dout, lse2, delta, k_ptr, v_ptr, start, position, k_len, qk_scale, k_strides,
    v_strides, SHAPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sums of a tile of queries, and of BLOCK_N keys from `start` on. Unless MASKED, all queries see them."""
    PRECISION: tl.constexpr = SHAPE.PRECISION
    key = start + tl.arange(0, SHAPE.BLOCK_N)
    is_key = key < k_len
    loaded = is_key if MASKED else None
    k_low, k_high = _keys(k_ptr, token_offsets(key, is_key, k_strides[2], SHAPE.FAR), loaded, SHAPE)
    v = columns(v_ptr, token_offsets(key, is_key, v_strides[2], SHAPE.FAR), loaded, 0, SHAPE.DV, SHAPE.PADDED_DV)
    scores = tl.dot(q_low, k_low.T, input_precision=PRECISION)
    if SHAPE.HIGH > 0:
        scores = tl.dot(q_high, k_high.T, scores, input_precision=PRECISION)
    live = None
    if MASKED:
        live = tl.broadcast_to(is_key[None, :], scores.shape)
        if SHAPE.CAUSAL:
            live = live & (key[None, :] <= position[:, None])
    _, p = recomputed_weights(scores, live, lse2[:, None], 0.0, qk_scale, False, PRECISION, False)
    dp = tl.dot(dout, v.T, input_precision=PRECISION)
    ds = score_gradients(p, dp, delta[:, None], None).to(k_low.dtype)
    dq_low = tl.dot(ds, k_low, dq_low, input_precision=PRECISION)
    if SHAPE.HIGH > 0:
        dq_high = tl.dot(ds, k_high, dq_high, input_precision=PRECISION)
    return dq_low, dq_high


@triton.jit(do_not_specialize=[*SIZES, "number", "scale", "qk_scale"])
def block_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, entries_ptr, ends_ptr, stops_ptr, blocks_ptr,
    parts_ptr,  # fp32 [pairs of the chunk, queries, choices, group, D], written
    q_len, k_len, shift, heads, repeats, group, choices, blocks, span, first_pair, first, number, scale, qk_scale,
    strides,  # of batch, head and token, of q, k, v and dout
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Computes the part of dq of the queries of a tile that is from one block."""
    ROWS: tl.constexpr = SHAPE.ROWS
    GROUP: tl.constexpr = SHAPE.GROUP
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    PADDED_LOW: tl.constexpr = SHAPE.PADDED_LOW
    PADDED_HIGH: tl.constexpr = SHAPE.PADDED_HIGH
    q_strides, k_strides, v_strides, dout_strides = strides
    local, block, at, stop = item_of_program(stops_ptr, blocks_ptr, ends_ptr, first, number, blocks, GROUP, ROWS)
    pair = (first_pair + local).to(tl.int64)
    batch, head = pair // heads, pair % heads
    entry = entries_at(entries_ptr, at, stop, GROUP, ROWS)
    query, place, in_group, inside = rows_of_entries(entry, choices, group, SHAPE)
    position = query + shift
    q_low, q_high = queries_of(
        q_ptr + batch * q_strides[0] + head * group * q_strides[1], query * q_strides[2] + in_group * q_strides[1],
        inside, SHAPE,
    )  # fmt: skip
    dout = columns(
        dout_ptr + batch * dout_strides[0] + head * group * dout_strides[1],
        query * dout_strides[2] + in_group * dout_strides[1], inside, 0, SHAPE.DV, SHAPE.PADDED_DV,
    )  # fmt: skip
    of_pair = pair * group * q_len
    lse2, delta = _statistics(lse2_ptr + of_pair, delta_ptr + of_pair, in_group * q_len + query, inside)
    k_ptr += batch * k_strides[0] + head // repeats * k_strides[1]
    v_ptr += batch * v_strides[0] + head // repeats * v_strides[1]
    begin, whole, end = keys_of_block(block, position, inside, k_len, span, SHAPE.CAUSAL)
    dq_low = tl.zeros([ROWS, PADDED_LOW], tl.float32)
    dq_high = dq_low
    if SHAPE.HIGH > 0:
        dq_high = tl.zeros([ROWS, PADDED_HIGH], tl.float32)
    whole = begin + (whole - begin) // BLOCK_N * BLOCK_N
    for start in range(begin, whole, BLOCK_N):
        dq_low, dq_high = _with_keys(
            dq_low, dq_high, q_low, q_high, dout, lse2, delta, k_ptr, v_ptr, start, position, k_len, qk_scale,
            k_strides, v_strides, SHAPE, MASKED=False,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        dq_low, dq_high = _with_keys(
            dq_low, dq_high, q_low, q_high, dout, lse2, delta, k_ptr, v_ptr, start, position, k_len, qk_scale,
            k_strides, v_strides, SHAPE, MASKED=True,
        )  # fmt: skip
    D: tl.constexpr = SHAPE.LOW + SHAPE.HIGH
    row = ((local.to(tl.int64) * q_len * choices + place) * group + in_group) * D
    store_columns(parts_ptr, dq_low * scale, row, inside, 0, SHAPE.LOW, PADDED_LOW)
    if SHAPE.HIGH > 0:
        store_columns(parts_ptr, dq_high * scale, row, inside, PADDED_LOW, SHAPE.HIGH, PADDED_HIGH)


@triton.jit(do_not_specialize=["q_len", "heads", "group", "choices", "first_pair"])
def add_kernel(
    parts_ptr, chosen_ptr,  # as block_dq_kernel writes them, see Transposed
    dq_ptr,  # [B, Hq, Nq, D], written
    q_len, heads, group, choices, first_pair, strides,  # of dq
    D: tl.constexpr, PADDED_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds the blocks of some queries of one head, in the order of their lists."""
    tiles = tl.cdiv(q_len, ROWS)
    of_group = tl.program_id(0) // tiles
    local, in_group = (of_group // group).to(tl.int64), of_group % group
    pair = first_pair + local
    query = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    is_row = query < q_len
    lists = query.to(tl.int64) * choices
    acc = tl.zeros([ROWS, PADDED_D], tl.float32)
    dims = tl.arange(0, PADDED_D)
    for slot in range(0, choices):
        live = is_row & (tl.load(chosen_ptr + pair * q_len * choices + lists + slot, mask=is_row, other=-1) >= 0)
        row = (local * q_len * choices + lists + slot) * group + in_group
        acc += tl.load(
            parts_ptr + (row * D)[:, None] + dims[None, :], mask=live[:, None] & (dims < D)[None, :], other=0.0
        )  # fmt: skip
    head = pair % heads * group + in_group
    dq_ptr += pair // heads * strides[0] + head * strides[1]
    store_columns(dq_ptr, acc, query.to(tl.int64) * strides[2], is_row, 0, D, PADDED_D)

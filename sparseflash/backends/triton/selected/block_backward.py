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
    queries_of_program,
    rows_of_entries,
)
from sparseflash.backends.triton.selected.loads import columns, store_columns, token_offsets
from sparseflash.backends.triton.selected.pieces import (
    load_pieces,
    plus_products,
    product,
    store_pieces,
    zeros_in_pieces,
)


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


@triton.jit(do_not_specialize=["q_len", "group", "blocks", "tiles", "count"])
def pack_kernel(
    lse2_ptr, delta_ptr,  # fp32 [B, Hq, Nq], as delta_kernel writes them
    entries_ptr, ends_ptr,  # see Transposed
    packed_ptr,  # fp32 [2, entries, GROUP], written
    q_len, group, blocks, tiles, count,
    GROUP: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Writes lse2 and delta in the order of entries: a gather in each step of `block_dkdv_kernel` would take longer."""
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    begin = tl.load(ends_ptr + pair * blocks - 1, mask=pair > 0, other=0)
    stop = tl.load(ends_ptr + (pair + 1) * blocks - 1)
    row = (tl.program_id(0) % tiles).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    at, in_group = begin + row // GROUP, row % GROUP
    inside = (at < stop) & (in_group < group)
    query = (tl.load(entries_ptr + at, mask=inside, other=0) >> BITS).to(tl.int64)
    read = (pair * group + in_group) * q_len + query
    to = at * GROUP + in_group
    tl.store(packed_ptr + to, tl.load(lse2_ptr + read, mask=inside, other=float("inf")), mask=at < stop)
    to += count.to(tl.int64) * GROUP
    tl.store(packed_ptr + to, tl.load(delta_ptr + read, mask=inside, other=0.0), mask=at < stop)


@triton.jit
def _with_queries(
    dk_low, dk_high, dv, k_low, k_high, v, q_ptr, dout_ptr, packed_ptr, row, rows, half, entry, key, is_key, shift,
    choices, group, qk_scale, q_strides, dout_strides, SHAPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sums of a tile of keys, and of the queries of some entries. Unless MASKED, all of these see all keys."""
    PRECISION: tl.constexpr = SHAPE.PRECISION
    query, _, in_group, inside = rows_of_entries(entry, choices, group, SHAPE)
    loaded = inside if MASKED or SHAPE.PADDED else None
    q_low, q_high = load_pieces(q_ptr, query * q_strides[2] + in_group * q_strides[3], loaded, SHAPE)
    dout = columns(
        dout_ptr, query * dout_strides[2] + in_group * dout_strides[3], loaded, 0, SHAPE.DV, SHAPE.PADDED_DV
    )  # fmt: skip
    place = row + tl.arange(0, SHAPE.ROWS)
    if MASKED:
        lse2 = tl.load(packed_ptr + place, mask=place < rows, other=float("inf"))
        delta = tl.load(packed_ptr + half + place, mask=place < rows, other=0.0)
    else:
        lse2, delta = tl.load(packed_ptr + place), tl.load(packed_ptr + half + place)
    p = product(k_low, k_high, q_low, q_high, SHAPE)
    live = None
    if MASKED:
        live = tl.broadcast_to(is_key[:, None], p.shape)
        if SHAPE.CAUSAL:
            live = live & (key[:, None] <= (query + shift)[None, :])
    ds = tl.dot(v, dout.T, input_precision=PRECISION)
    # Always true. If the compiler saw that these products lead to the next ones, it would give each of two groups of
    # warps all of them, so that both computed the same.
    if row < rows:
        _exps, p = recomputed_weights(p, live, lse2[None, :], 0.0, qk_scale, False, PRECISION, False)
        ds = score_gradients(p, ds, delta[None, :], None)
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
    dk_low, dk_high = plus_products(dk_low, dk_high, ds.to(q_low.dtype), q_low, q_high, SHAPE)
    return dk_low, dk_high, dv


@triton.jit(do_not_specialize=[*SIZES, "number", "count", "longest", "scale", "qk_scale"])
def block_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, packed_ptr, entries_ptr, ends_ptr,
    stops_ptr, blocks_ptr,  # see items_of, if lists are SPLIT; otherwise None
    dk_ptr, dv_ptr,  # [B, heads, Nk, D] and [B, heads, Nk, DV] contiguous, written; or fp32 [items, span, D or DV]
    q_len, k_len, shift, heads, repeats, group, choices, blocks, span, first_pair, first, number, count, longest, scale,
    qk_scale, strides,  # of q, k, v and dout: see block_forward_kernel
    SHAPE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of BLOCK_N keys: of all their queries, or of up to `longest` entries of them if SPLIT."""
    ROWS: tl.constexpr = SHAPE.ROWS
    GROUP: tl.constexpr = SHAPE.GROUP
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    PADDED_DV: tl.constexpr = SHAPE.PADDED_DV
    size: tl.constexpr = ROWS // GROUP
    q_strides, k_strides, v_strides, dout_strides = strides
    parts = tl.cdiv(span, BLOCK_N)
    item = tl.program_id(0) // parts
    found = item
    if SPLIT:
        found = tl.load(blocks_ptr + item).to(tl.int32)
    exists = found < number
    found = tl.where(exists, found, 0)
    pair, block = (found // blocks).to(tl.int64), found % blocks
    batch, head = pair // heads, pair % heads
    stop = tl.load(ends_ptr + found)
    begin = tl.load(ends_ptr + found - 1, mask=found > 0, other=0)
    before = 0
    if SPLIT:
        before = (item - tl.load(stops_ptr + found - 1, mask=found > 0, other=0)).to(tl.int32) * longest
        stop = tl.minimum(stop, begin + before + longest)
        begin += before
        stop = tl.where(exists, stop, begin)
    first_key = block * span + tl.program_id(0) % parts * BLOCK_N
    key = first_key + tl.arange(0, BLOCK_N)
    is_key = key < tl.where(exists, k_len, 0)
    k_low, k_high = load_pieces(
        k_ptr + batch * k_strides[0] + head // repeats * k_strides[1],
        token_offsets(key, is_key, k_strides[2], SHAPE.FAR), is_key, SHAPE,
    )  # fmt: skip
    v = columns(
        v_ptr + batch * v_strides[0] + head // repeats * v_strides[1],
        token_offsets(key, is_key, v_strides[2], SHAPE.FAR), is_key, 0, SHAPE.DV, PADDED_DV,
    )  # fmt: skip
    q_ptr += batch * q_strides[0] + head * q_strides[1]
    dout_ptr += batch * dout_strides[0] + head * dout_strides[1]
    packed_ptr += begin.to(tl.int64) * GROUP
    half = count.to(tl.int64) * GROUP  # of the packed numbers
    rows = (stop - begin) * GROUP
    dk_low, dk_high = zeros_in_pieces(BLOCK_N, SHAPE)
    dv = tl.zeros([BLOCK_N, PADDED_DV], tl.float32)
    # Only the first entries may be of queries in this block. Those, and a last tile with fewer rows, are masked.
    masked = 0
    if SHAPE.CAUSAL:
        masked = tl.maximum(tl.minimum(stop - begin, first_key + BLOCK_N - block * span - before), 0)
        masked = (masked + size - 1) // size
    elif first_key + BLOCK_N > k_len:
        masked = (stop - begin + size - 1) // size
    full = (stop - begin) // size
    rest = tl.where((stop - begin > full * size) & (full >= masked), 1, 0)
    # Entries are loaded one iteration ahead: addresses that were loaded in the same iteration would keep the compiler
    # from prefetching the queries.
    following = entries_at(entries_ptr, begin + tl.where(masked == 0, full, 0) * size, stop, GROUP, ROWS)
    for step in range(0, masked + rest):
        entry = following
        at = tl.where(step < masked, step, full) * size
        next_at = tl.where(step + 1 < masked, step + 1, full) * size
        following = entries_at(entries_ptr, begin + next_at, stop, GROUP, ROWS)
        dk_low, dk_high, dv = _with_queries(
            dk_low, dk_high, dv, k_low, k_high, v, q_ptr, dout_ptr, packed_ptr, at * GROUP, rows, half, entry,
            key, is_key, shift, choices, group, qk_scale, q_strides, dout_strides, SHAPE, MASKED=True,
        )  # fmt: skip
    following = entries_at(entries_ptr, begin + masked * size, stop, GROUP, ROWS)
    for step in range(masked, full):
        entry = following
        following = entries_at(entries_ptr, begin + (step + 1) * size, stop, GROUP, ROWS)
        dk_low, dk_high, dv = _with_queries(
            dk_low, dk_high, dv, k_low, k_high, v, q_ptr, dout_ptr, packed_ptr, step * ROWS, rows, half, entry,
            key, is_key, shift, choices, group, qk_scale, q_strides, dout_strides, SHAPE, MASKED=False,
        )  # fmt: skip
    D: tl.constexpr = SHAPE.LOW + SHAPE.HIGH
    row = pair * k_len + key
    if SPLIT:
        row = item.to(tl.int64) * span + key - block * span
        is_key = key < tl.where(exists, block * span + span, 0)
    store_pieces(dk_ptr, dk_low * scale, dk_high * scale, row * D, is_key, SHAPE)
    store_columns(dv_ptr, dv, row * SHAPE.DV, is_key, 0, SHAPE.DV, PADDED_DV)


@triton.jit(do_not_specialize=["k_len", "blocks", "span"])
def sum_kernel(
    parts_ptr, stops_ptr,  # fp32 [items, span, WIDTH], as block_dkdv_kernel writes them; see items_of
    sums_ptr,  # [pairs, Nk, WIDTH], written
    k_len, blocks, span, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds the parts of some keys of a block, in order."""
    parts = tl.cdiv(span, ROWS)
    found = tl.program_id(0) // parts
    in_block = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
    pair, key = (found // blocks).to(tl.int64), found % blocks * span + in_block
    dims = tl.arange(0, PADDED)
    inside = ((in_block < span) & (key < k_len))[:, None] & (dims < WIDTH)[None, :]
    total = tl.zeros([ROWS, PADDED], tl.float32)
    first = tl.load(stops_ptr + found - 1, mask=found > 0, other=0)
    for item in range(first, tl.load(stops_ptr + found)):
        row = item * span + in_block  # in 64 bits, as stops
        total += tl.load(parts_ptr + (row * WIDTH)[:, None] + dims[None, :], mask=inside, other=0.0)
    pointers = sums_ptr + ((pair * k_len + key) * WIDTH)[:, None] + dims[None, :]
    tl.store(pointers, total.to(sums_ptr.dtype.element_ty), mask=inside)


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
    k_low, k_high = load_pieces(k_ptr, token_offsets(key, is_key, k_strides[2], SHAPE.FAR), loaded, SHAPE)
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
    return plus_products(dq_low, dq_high, ds, k_low, k_high, SHAPE)


@triton.jit(do_not_specialize=[*SIZES, "number", "scale", "qk_scale"])
def block_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, entries_ptr, ends_ptr, stops_ptr, blocks_ptr,
    parts_ptr,  # fp32 [pairs of the chunk, queries, choices, group, D], written
    q_len, k_len, shift, heads, repeats, group, choices, blocks, span, first_pair, first, number, scale, qk_scale,
    strides,  # of q, k, v and dout: see block_forward_kernel
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Computes the part of dq of the queries of a tile that is from one block."""
    ROWS: tl.constexpr = SHAPE.ROWS
    GROUP: tl.constexpr = SHAPE.GROUP
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    q_strides, k_strides, v_strides, dout_strides = strides
    local, block, at, stop = item_of_program(stops_ptr, blocks_ptr, ends_ptr, first, number, blocks, GROUP, ROWS)
    pair = (first_pair + local).to(tl.int64)
    batch, head = pair // heads, pair % heads
    entry = entries_at(entries_ptr, at, stop, GROUP, ROWS)
    query, place, in_group, inside = rows_of_entries(entry, choices, group, SHAPE)
    position = query + shift
    q_low, q_high = load_pieces(
        q_ptr + batch * q_strides[0] + head * q_strides[1], query * q_strides[2] + in_group * q_strides[3], inside,
        SHAPE,
    )  # fmt: skip
    dout = columns(
        dout_ptr + batch * dout_strides[0] + head * dout_strides[1],
        query * dout_strides[2] + in_group * dout_strides[3], inside, 0, SHAPE.DV, SHAPE.PADDED_DV,
    )  # fmt: skip
    row = (pair * group + in_group) * q_len + query
    lse2 = tl.load(lse2_ptr + row, mask=inside, other=float("inf"))
    delta = tl.load(delta_ptr + row, mask=inside, other=0.0)
    k_ptr += batch * k_strides[0] + head // repeats * k_strides[1]
    v_ptr += batch * v_strides[0] + head // repeats * v_strides[1]
    begin, whole, end = keys_of_block(block, position, inside, k_len, span, SHAPE.CAUSAL)
    dq_low, dq_high = zeros_in_pieces(ROWS, SHAPE)
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
    store_pieces(parts_ptr, dq_low * scale, dq_high * scale, row, inside, SHAPE)


@triton.jit(do_not_specialize=["q_len", "heads", "group", "choices", "first_pair"])
def add_kernel(
    parts_ptr, chosen_ptr,  # as block_dq_kernel writes them, see Transposed
    dq_ptr,  # [B, Hq, Nq, D], written
    q_len, heads, group, choices, first_pair, strides,  # of dq
    D: tl.constexpr, PADDED_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds the blocks of some queries of one head, in the order of their lists."""
    local, pair, in_group, query, is_row, lists = queries_of_program(q_len, group, choices, first_pair, ROWS)
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

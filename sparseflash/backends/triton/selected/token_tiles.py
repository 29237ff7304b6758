"""The gradients of keys and values by tiles of tokens: a tile gathers all queries that have chosen a token of it.

dk and dv of a tile are sums over its queries in ascending order. Weights of tokens that a query of the tile has not
chosen are 0. So nothing is written for each query and token, as the kernels of `token_sums.py` do, and queries that
choose neighbours are read once for all of them.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.device_functions.softmax import recomputed_weights, score_gradients
from sparseflash.backends.triton.selected.block_forward import entries_at
from sparseflash.backends.triton.selected.loads import columns, store_columns, token_offsets
from sparseflash.backends.triton.selected.places import ones

TILE = 64  # tokens


@triton.jit
def _either(x, y):
    return x | y


@triton.jit(do_not_specialize=["k_len", "tiles"])
def unite_kernel(
    bits_ptr,  # int32 [pairs of the chunk, k_len, WORDS], as mark_kernel writes them
    united_ptr, counts_ptr,  # int32 [pairs, tiles, WORDS] and [pairs, tiles], written
    k_len, tiles, WORDS: tl.constexpr, STEP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Unites the bits of the tokens of a tile, a bit for each query of the chunk, and counts them."""
    found = tl.program_id(0).to(tl.int64)
    pair, tile = found // tiles, (found % tiles).to(tl.int32)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    bits_ptr += (pair * k_len + token) * WORDS
    total = tl.zeros([STEP], tl.int32)
    for first in range(0, WORDS, STEP):
        word = first + tl.arange(0, STEP)
        words = tl.load(bits_ptr[:, None] + word[None, :], mask=(token < k_len)[:, None], other=0)
        united = tl.reduce(words, 0, _either)
        tl.store(united_ptr + found * WORDS + word, united)
        total += ones(united)
    tl.store(counts_ptr + found, tl.sum(total, 0))


@triton.jit
def entries_kernel(
    united_ptr, ends_ptr,  # see unite_kernel; int32 [pairs, tiles], the running sums of its counts
    entries_ptr,  # int32, written: the queries of each tile, counted from the first of the chunk
    WORDS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Writes the queries of a tile in ascending order."""
    found = tl.program_id(0).to(tl.int64)
    place = tl.load(ends_ptr + found - 1, mask=found > 0, other=0)
    for first in range(0, WORDS, STEP):
        word = first + tl.arange(0, STEP)
        united = tl.load(united_ptr + found * WORDS + word)
        count = ones(united)
        at = place + tl.cumsum(count, 0) - count
        for bit in range(0, 32):
            live = (united >> bit) & 1
            tl.store(entries_ptr + at, word * 32 + bit, mask=live > 0)
            at += live
        place += tl.sum(count, 0)


@triton.jit(
    do_not_specialize=["q_len", "k_len", "kv_heads", "group", "first_pair", "first_query", "tiles", "scale", "qk_scale"]
)
def tile_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr,  # [B, Hq, Nq, D], [B, Hkv, Nk, D], [B, Hkv, Nk, DV], [B, Hq, Nq, DV]
    lse2_ptr, delta_ptr,  # fp32 [B, Hq, Nq], as delta_kernel writes them
    bits_ptr, entries_ptr, ends_ptr,  # see unite_kernel and entries_kernel
    dk_ptr, dv_ptr,  # fp32 [B * Hkv * Nk, D] and [B * Hkv * Nk, DV], added to
    q_len, k_len, kv_heads, group, first_pair, first_query, tiles, scale, qk_scale,
    strides,  # of batch, head and token, of q, k, v and dout
    D: tl.constexpr, PADDED_D: tl.constexpr, DV: tl.constexpr, PADDED_DV: tl.constexpr,
    GROUP: tl.constexpr,  # heads of a query, padded to a power of two
    ROWS: tl.constexpr,  # queries of a step times GROUP
    WORDS: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Adds to dk and dv of the tokens of a tile what the queries of the chunk give them."""
    SIZE: tl.constexpr = ROWS // GROUP
    q_strides, k_strides, v_strides, dout_strides = strides
    found = tl.program_id(0).to(tl.int64)
    local, tile = found // tiles, (found % tiles).to(tl.int32)
    pair = first_pair + local
    batch, kv_head = pair // kv_heads, pair % kv_heads
    begin = tl.load(ends_ptr + found - 1, mask=found > 0, other=0)
    stop = tl.load(ends_ptr + found)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    # A tile that nobody chose is not read: it may hold numbers that are not finite, whose products with zeros are NaN.
    is_token = token < tl.where(stop > begin, k_len, 0)
    k_offsets = token_offsets(token, is_token, k_strides[2], FAR)
    k = columns(k_ptr + batch * k_strides[0] + kv_head * k_strides[1], k_offsets, is_token, 0, D, PADDED_D)
    v_offsets = token_offsets(token, is_token, v_strides[2], FAR)
    v = columns(v_ptr + batch * v_strides[0] + kv_head * v_strides[1], v_offsets, is_token, 0, DV, PADDED_DV)
    in_group = (tl.arange(0, ROWS) % GROUP).to(tl.int64)
    head, first_query = kv_head * group, tl.cast(first_query, tl.int64)  # queries may lie 2^31 numbers apart
    q_ptr += batch * q_strides[0] + head * q_strides[1] + first_query * q_strides[2]
    dout_ptr += batch * dout_strides[0] + head * dout_strides[1] + first_query * dout_strides[2]
    rows = ((batch * kv_heads * group) + head + in_group) * q_len + first_query
    bits_ptr += (local * k_len + tl.where(is_token, token, 0)) * WORDS
    dk = tl.zeros([TOKENS, PADDED_D], tl.float32)
    dv = tl.zeros([TOKENS, PADDED_DV], tl.float32)
    # Entries are loaded one iteration ahead: addresses that were loaded in the same iteration would keep the compiler
    # from prefetching the queries.
    following = entries_at(entries_ptr, begin, stop, GROUP, ROWS)
    # At least once: ptxas of Triton 3.6 waits for each matrix instruction if the loop may be left out (C7515).
    for step in range(0, tl.maximum(tl.cdiv(stop - begin, SIZE), 1)):
        at = begin + step * SIZE
        entry = following
        following = entries_at(entries_ptr, at + SIZE, stop, GROUP, ROWS)
        inside = (entry >= 0) & (in_group < group)
        query = tl.where(inside, entry, 0).to(tl.int64)
        q = columns(q_ptr, query * q_strides[2] + in_group * q_strides[1], inside, 0, D, PADDED_D)
        dout = columns(dout_ptr, query * dout_strides[2] + in_group * dout_strides[1], inside, 0, DV, PADDED_DV)
        lse2 = tl.load(lse2_ptr + rows + query, mask=inside, other=float("inf"))
        delta = tl.load(delta_ptr + rows + query, mask=inside, other=0.0)
        # One bit for each query, [TOKENS, SIZE], repeated for its heads.
        place = at + tl.arange(0, SIZE)
        number = tl.load(entries_ptr + place, mask=place < stop, other=0)
        words = tl.load(bits_ptr[:, None] + (number >> 5)[None, :], mask=is_token[:, None], other=0)
        chosen = (words >> (number & 31)[None, :]) & 1
        chosen = tl.broadcast_to(chosen[:, :, None], (TOKENS, SIZE, GROUP)).reshape(TOKENS, ROWS)
        live = chosen > 0
        p = tl.dot(k, q.T, input_precision=PRECISION)
        # Always true. If the compiler saw that a product leads to the next one, it would give each of two groups of
        # warps all of it, so that both computed the same.
        if at < stop:
            _, p = recomputed_weights(p, live, lse2[None, :], 0.0, qk_scale, False, PRECISION, False)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        ds = tl.dot(v, dout.T, input_precision=PRECISION)
        if at < stop:  # a value that nobody chose may be infinite
            ds = tl.where(live, score_gradients(p, ds, delta[None, :], None), 0.0)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    row = pair * k_len + token
    dk_low = columns(dk_ptr, row * D, is_token, 0, D, PADDED_D)
    store_columns(dk_ptr, dk_low + dk * scale, row * D, is_token, 0, D, PADDED_D)
    dv_low = columns(dv_ptr, row * DV, is_token, 0, DV, PADDED_DV)
    store_columns(dv_ptr, dv_low + dv, row * DV, is_token, 0, DV, PADDED_DV)

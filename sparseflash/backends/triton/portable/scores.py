"""Changes of scores in the kernels, and the gradients of what they learn. `sparseflash/scores/` is the definition.

CHANGES is 0 if scores are only scaled and masked, and then nothing here is compiled. Otherwise it is the sum of CHANGED
and of the bits below; further changes are those whose pointers are not None. Changed scores are in natural units, with
the scale inside, so what follows takes `log2(e)` in place of `scale * log2(e)`.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.portable.loads import token_numbers

CHANGED = tl.constexpr(1)
CAPPED = tl.constexpr(2)
LOGARITHMIC = tl.constexpr(4)  # the decay with distance
HARDWARE_TANH = tl.constexpr(8)  # with a relative error of 2^-11, no more than rounding to half precision makes
COMPILED = tl.constexpr(16)  # not interpreted, so instructions may be written
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def changed_scores(
    scores, changes, scale, batch, head, first_q, first_k, q_len, k_len,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, CHANGES: tl.constexpr,
    OWN: tl.constexpr, MASKED: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """`(changed scores, derivative of the cap, own)` of products; the derivative is 1.0 without a cap.

    own: of one's own function, its derivative and what else the gradients need; or 1.0 and nothing. changes: the
    kernel's arguments from `cap` to `own_numbers`, in that order. Without MASKED no token of the tile is past the ends.
    See loads.py for `first_q` and `first_k`.
    """
    q, k = token_numbers(first_q, TILE_M), token_numbers(first_k, TILE_N)
    scores = scores * scale
    factor = 1.0
    if CAPPED & CHANGES:
        ratio = tanh(scores * changes[1], CHANGES)
        scores = ratio * changes[0]
        factor = 1.0 - ratio * ratio
    if changes[2] is not None:  # slopes
        slope = tl.load(changes[2] + head).to(tl.float32)
        scores = scores - slope * distances(q, k, q_len, k_len, CHANGES, TRANSPOSED)
    if changes[3] is not None:  # a table
        values_ptr = changes[3] + tl.cast(head, tl.int64) * changes[7]
        if changes[4] is not None:
            smallest, shared = smallest_code(changes[4], first_q, first_k, q_len, k_len, TILE_M, TILE_N)
            if shared:
                scores = scores + tl.load(values_ptr + smallest).to(tl.float32)
            else:
                at = code_differences(changes[4], changes[5], changes[6], q, k, q_len, k_len, TRANSPOSED)
                scores = scores + entries_at(values_ptr, at, CHANGES).to(tl.float32)
        else:
            at = code_differences(changes[4], changes[5], changes[6], q, k, q_len, k_len, TRANSPOSED)
            scores = scores + entries_at(values_ptr, at, CHANGES).to(tl.float32)
    if changes[8] is not None:  # a bias of keys
        start = tl.cast(batch, tl.int64) * changes[9][0] + tl.cast(head, tl.int64) * changes[9][1]
        values = tl.load(changes[8] + start + k * changes[9][2], mask=k < k_len, other=0.0).to(tl.float32)
        scores = scores + along_keys(values, TRANSPOSED)
    if changes[10] is not None:  # a bias
        scores = scores + load_bias(
            changes[10], changes[11], batch, head, first_q, first_k, q, k, q_len, k_len, TILE_M, TILE_N, MASKED,
            TRANSPOSED,
        ).to(tl.float32)  # fmt: skip
    if changes[12] is not None:  # a bias of live tiles
        scores = scores + load_tile_bias(
            changes[12], changes[13], batch, head, first_q, first_k, BLOCK_Q, BLOCK_K, TILE_M, TILE_N, TRANSPOSED
        ).to(tl.float32)
    own = 1.0, ()
    if OWN is not None:  # one's own function, which must see no places past the ends
        q, k = tl.minimum(q, q_len - 1), tl.minimum(k, k_len - 1)
        scores, slope, more = OWN(
            scores, batch, head, along_queries(q, TRANSPOSED), along_keys(k, TRANSPOSED), changes[14], changes[15],
            CHANGES,
        )  # fmt: skip
        own = slope, more
    return scores, factor, own


@triton.jit
def load_bias(
    bias_ptr, strides, batch, head, first_q, first_k, q, k, q_len, k_len,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """A tile of a bias. The start is a 64-bit scalar and the rest fits in 32 bits, unless tokens are gathered: 64-bit
    addresses of all scores would take more registers than there are.
    """
    rows, columns = tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    start = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    if first_q.type.is_block():
        rows = tl.cast(first_q, tl.int64)
    else:
        start += tl.cast(first_q, tl.int64) * strides[2]
    if first_k.type.is_block():
        columns = tl.cast(first_k, tl.int64)
    else:
        start += tl.cast(first_k, tl.int64) * strides[3]
    at = bias_ptr + start + (
        along_queries(rows * strides[2], TRANSPOSED) + along_keys(columns * strides[3], TRANSPOSED)
    )  # fmt: skip
    if MASKED:
        inside = along_queries(q < q_len, TRANSPOSED) & along_keys(k < k_len, TRANSPOSED)
        return tl.load(at, mask=inside, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def load_tile_bias(
    tile_bias_ptrs, numbers, batch, head, first_q, first_k,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """A tile of a bias stored for the live tiles of the mask, in whose own tiles the kernel must run.

    tile_bias_ptrs: `StoredTiles`: the values, contiguous, the numbers of the tiles, int32 [P, Mq, W, 2], and the
    patterns. numbers: the strides of batch and head of the values, in tiles, and of the patterns, 0 where shared; Mq
    and W. Tiles are stored whole, so nothing is read past an end.
    """
    tile = number_of_tile(tile_bias_ptrs, numbers, batch, head, first_q // BLOCK_Q, first_k // BLOCK_K)
    tile += tl.cast(batch, tl.int64) * numbers[0] + tl.cast(head, tl.int64) * numbers[1]
    at = places_in_tile(first_q, first_k, BLOCK_Q, BLOCK_K, TILE_M, TILE_N, TRANSPOSED)
    return tl.load(tile_bias_ptrs[0] + tile * (BLOCK_Q * BLOCK_K) + at)


@triton.jit
def number_of_tile(tile_bias_ptrs, numbers, batch, head, row, column):
    """The place of a live tile in the mask's list, int64, from its block row and column; see blockmask/numbering.py."""
    pattern = tl.load(tile_bias_ptrs[2] + batch * numbers[2] + head * numbers[3])
    word_ptr = tile_bias_ptrs[1] + 2 * (tl.cast(pattern * numbers[4] + row, tl.int64) * numbers[5] + column // 32)
    x = tl.load(word_ptr) & ~(-1 << column % 32)  # the live tiles before it, which are counted
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return tl.cast(tl.load(word_ptr + 1) + ((x + (x >> 16)) & 63), tl.int64)


@triton.jit
def places_in_tile(
    first_q, first_k,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Where the scores of a step stand in their tile of BLOCK_Q x BLOCK_K, row by row."""
    rows, columns = first_q % BLOCK_Q + tl.arange(0, TILE_M), first_k % BLOCK_K + tl.arange(0, TILE_N)
    return along_queries(rows * BLOCK_K, TRANSPOSED) + along_keys(columns, TRANSPOSED)


@triton.jit
def along_queries(x, TRANSPOSED: tl.constexpr):
    """One number a query, to broadcast with scores, which are `[keys, queries]` if TRANSPOSED."""
    return x[None, :] if TRANSPOSED else x[:, None]


@triton.jit
def along_keys(x, TRANSPOSED: tl.constexpr):
    """One number a key, to broadcast with scores."""
    return x[:, None] if TRANSPOSED else x[None, :]


@triton.jit
def distances(q, k, q_len, k_len, CHANGES: tl.constexpr, TRANSPOSED: tl.constexpr):
    """What slopes are multiplied by: the distance of query and key, aligned at the ends, or log(1 + distance).

    In fp32, which is exact below 2^24 tokens, and takes one operation a score.
    """
    query = (q + (k_len - q_len)).to(tl.float32)
    apart = tl.abs(along_queries(query, TRANSPOSED) - along_keys(k.to(tl.float32), TRANSPOSED))
    if LOGARITHMIC & CHANGES:
        return tl.log2(1.0 + apart) * LN2
    else:
        return apart


@triton.jit
def code_differences(until_ptr, q_codes_ptr, k_codes_ptr, q, k, q_len, k_len, TRANSPOSED: tl.constexpr):
    """The places of scores in a table of relative positions, which follow from the tokens' numbers if `until_ptr`."""
    q_codes, k_codes = tl.minimum(q, q_len - 1), tl.minimum(k, k_len - 1)
    if until_ptr is not None:
        q_codes += k_len - 1
    else:
        q_codes, k_codes = tl.load(q_codes_ptr + q_codes), tl.load(k_codes_ptr + k_codes)
    return along_queries(q_codes, TRANSPOSED) - along_keys(k_codes, TRANSPOSED)


@triton.jit
def entries_at(table_ptr, at, CHANGES: tl.constexpr):
    """`table[at]`, for one place a score.

    As an instruction and not as `tl.load`, for which Triton wants neighbouring places in neighbouring threads: it would
    pass all scores through shared memory, those of the tiles that load nothing, too.
    """
    DTYPE: tl.constexpr = table_ptr.dtype.element_ty
    if COMPILED & CHANGES:
        if DTYPE.primitive_bitwidth == 16:
            bits = tl.inline_asm_elementwise(
                "{ .reg .b64 a; mad.wide.s32 a, $2, 2, $1; ld.global.nc.b16 $0, [a]; }", "=h,l,r",
                [table_ptr.to(tl.int64), at], tl.int16, True, 1,
            )  # fmt: skip
        else:
            tl.static_assert(DTYPE.primitive_bitwidth == 32)
            bits = tl.inline_asm_elementwise(
                "{ .reg .b64 a; mad.wide.s32 a, $2, 4, $1; ld.global.nc.b32 $0, [a]; }", "=r,l,r",
                [table_ptr.to(tl.int64), at], tl.int32, True, 1,
            )  # fmt: skip
        return bits.to(DTYPE, bitcast=True)
    else:
        return tl.load(table_ptr + at)


@triton.jit
def smallest_code(until_ptr, first_q, first_k, q_len, k_len, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """`(the smallest of the code_differences of a tile, whether all of them have the same bucket)`."""
    least_q, most_q = least_and_most(first_q, q_len, TILE_M)
    least_k, most_k = least_and_most(first_k, k_len, TILE_N)
    smallest, largest = least_q + (k_len - 1) - most_k, most_q + (k_len - 1) - least_k
    return smallest, tl.load(until_ptr + smallest) >= largest


@triton.jit
def least_and_most(first, length, TOKENS: tl.constexpr):
    """The smallest and the largest number of the tokens of a tile, with the last token in place of any past the end."""
    if first.type.is_block():
        return tl.minimum(tl.min(first, 0), length - 1), tl.minimum(tl.max(first, 0), length - 1)
    else:
        return tl.minimum(first, length - 1), tl.minimum(first + TOKENS - 1, length - 1)


@triton.jit
def tanh(x, CHANGES: tl.constexpr):
    """tanh to within a few ulps, or as the hardware does it."""
    if HARDWARE_TANH & CHANGES:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
        square = x * x  # near 0 the difference would lose digits, and the Taylor series has few terms
        series = -1.4558343870513183e-03
        series = series * square + 3.5921280365724810e-03
        series = series * square - 8.8632355299021966e-03
        series = series * square + 2.1869488536155203e-02
        series = series * square - 5.3968253968253968e-02
        series = series * square + 1.3333333333333333e-01
        series = series * square - 3.3333333333333333e-01
        return tl.where(square < 0.25, x + x * square * series, far)


@triton.jit
def with_sink(m_i, l_i, sink_ptr, head, qk_scale, KEEP: tl.constexpr):
    """`(new m_i, factor for the sums, new l_i)` when a key with the score of the sink has been added."""
    sink = tl.load(sink_ptr + head).to(tl.float32)
    if KEEP:
        m_new = tl.maximum(m_i, sink)
        alpha = tl.exp2((m_i - m_new) * qk_scale)
        return m_new, alpha, l_i * alpha + tl.exp2((sink - m_new) * qk_scale)
    else:
        m_new = tl.maximum(m_i, sink * LOG2E)
        alpha = tl.exp2(m_i - m_new)
        return m_new, alpha, l_i * alpha + tl.exp2(sink * LOG2E - m_new)


@triton.jit
def slope_gradients(ds, q, k, q_len, k_len, CHANGES: tl.constexpr):
    """The gradient of the slope by the scores of each query, [TILE_M]."""
    return -tl.sum(ds * distances(q, k, q_len, k_len, CHANGES, False), 1)


@triton.jit
def store_bias_gradients(ds, dbias_ptr, batch_head, q, k, q_len, k_len):
    """Writes the gradients of a tile of scores to `[B, Hq, Nq, Nk]`."""
    row = tl.cast(q, tl.int64) * k_len
    start = dbias_ptr + tl.cast(batch_head, tl.int64) * q_len * k_len
    inside = (q < q_len)[:, None] & (k < k_len)[None, :]
    tl.store(start + row[:, None] + k[None, :], ds.to(dbias_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_tile_gradients(
    ds, dtiles_ptr, dtiles_starts_ptr, tile_bias_ptrs, numbers, batch_head, batch, head, first_q, first_k,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of a bias of live tiles by a tile of scores, those of dead ones, which are 0, too.

    dtiles_starts_ptr: int64 [B * Hq], the first of the tiles to which each batch element and head writes.
    """
    tile = number_of_tile(tile_bias_ptrs, numbers, batch, head, first_q // BLOCK_Q, first_k // BLOCK_K)
    tile += tl.load(dtiles_starts_ptr + batch_head)
    at = places_in_tile(first_q, first_k, BLOCK_Q, BLOCK_K, TILE_M, TILE_N, False)
    tl.store(dtiles_ptr + tile * (BLOCK_Q * BLOCK_K) + at, ds.to(dtiles_ptr.dtype.element_ty))


@triton.jit
def add_table_gradients(ds, dtable_ptr, bucket, entries):
    """Adds the gradients of a tile to this program's own copy of the table, one bucket after another.

    A tile far from the diagonal meets few buckets. One thread reads and writes an entry, so no barrier is needed.
    entries: of the table, or None if every bucket lies in it.
    """
    first, last = tl.min(tl.min(bucket, 1), 0), tl.max(tl.max(bucket, 1), 0)
    if entries is not None:
        first, last = tl.maximum(first, 0), tl.minimum(last, entries - 1)
    for number in range(first, last + 1):
        add_to_entry(dtable_ptr + number, tl.sum(tl.where(bucket == number, ds, 0.0), 1))


@triton.jit
def add_to_entry(entry_ptr, gradients):
    """Adds the gradients of the queries, [TILE_M], to an entry of this program's own copy of a table."""
    tl.store(entry_ptr, tl.load(entry_ptr) + tl.sum(gradients, 0))


@triton.jit
def no_run(TILE_M: tl.constexpr):
    """The `table_sums` of add_run_gradients before the first tile."""
    return tl.zeros([TILE_M], tl.float32), 0


@triton.jit
def add_last_run(table_sums, dtable_ptr):
    """Adds the `table_sums` of add_run_gradients after the last tile."""
    add_to_entry(dtable_ptr + table_sums[1], table_sums[0])


@triton.jit
def add_run_gradients(
    table_sums, ds, dtable_ptr, buckets_ptr, until_ptr, first_q, first_k, q, k, q_len, k_len,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of a tile to this program's own copy of the table, or to `table_sums`, which it returns.

    table_sums: `(the gradients by query, [TILE_M], of the last tiles that have only one bucket, that bucket)`. They are
    added to the copy when another bucket follows, so most tiles need no sum over the queries, for which warps wait.
    """
    sums, bucket = table_sums
    smallest, shared = smallest_code(until_ptr, first_q, first_k, q_len, k_len, TILE_M, TILE_N)
    if shared:
        own = tl.load(buckets_ptr + smallest)
        if own != bucket:
            add_to_entry(dtable_ptr + bucket, sums)
            sums = tl.zeros_like(sums)
        sums += tl.sum(ds, 1)
        bucket = own
    else:
        at = code_differences(until_ptr, None, None, q, k, q_len, k_len, False)
        add_table_gradients(ds, dtable_ptr, entries_at(buckets_ptr, at, CHANGES), None)
    return sums, bucket

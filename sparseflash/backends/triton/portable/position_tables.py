"""Tables of relative positions in the kernels: which entries the scores of a tile read, and how their gradients are
added to these.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.portable.change_flags import COMPILED
from sparseflash.backends.triton.portable.loads import along_keys, along_queries


@triton.jit
def code_differences(changes, q, k, q_len, k_len, TRANSPOSED: tl.constexpr):
    """The places of scores in a table of relative positions, which follow from the tokens' numbers if `until_ptr`."""
    q_codes, k_codes = tl.minimum(q, q_len - 1), tl.minimum(k, k_len - 1)
    if changes.until_ptr is not None:
        q_codes += k_len - 1
    else:
        q_codes, k_codes = tl.load(changes.q_codes_ptr + q_codes), tl.load(changes.k_codes_ptr + k_codes)
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
def outer_runs(until_ptr, codes):
    """`(last code with the bucket of the first one, first code with the bucket of the last one)`, of so many codes; or
    None.

    Far from the diagonal all scores have one of these buckets, and then a tile needs no load to know that.
    """
    if until_ptr is not None:
        runs = tl.load(until_ptr), tl.load(until_ptr + codes)
    else:
        runs = None
    return runs


@triton.jit
def codes_of_tile(first_q, first_k, q_len, k_len, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The smallest and the largest of the code_differences of a tile, if these follow from the tokens' numbers."""
    least_q, most_q = least_and_most(first_q, q_len, TILE_M)
    least_k, most_k = least_and_most(first_k, k_len, TILE_N)
    return least_q + (k_len - 1) - most_k, most_q + (k_len - 1) - least_k


@triton.jit
def shared_bucket(changes, smallest, largest):
    """`(a code, whether all codes from the smallest to the largest have its bucket)`."""
    first_end, last_start = changes.outer_runs
    is_first, is_last = largest <= first_end, smallest >= last_start
    code = tl.where(is_first, 0, tl.where(is_last, changes.values_stride - 1, smallest))
    is_shared = is_first | is_last
    if not is_shared:
        is_shared = tl.load(changes.until_ptr + smallest) >= largest
    return code, is_shared


@triton.jit
def least_and_most(first, length, TOKENS: tl.constexpr):
    """The smallest and the largest number of the tokens of a tile, with the last token in place of any past the end."""
    if first.type.is_block():
        return tl.minimum(tl.min(first, 0), length - 1), tl.minimum(tl.max(first, 0), length - 1)
    else:
        return tl.minimum(first, length - 1), tl.minimum(first + TOKENS - 1, length - 1)


@triton.jit
def add_table_gradients(ds, dtable_ptr, bucket, entries):
    """Adds the gradients of a tile to this program's own copy of the table, one bucket after another.

    One thread reads and writes an entry, so no barrier is needed. entries: of the table, or None if every bucket lies
    in it.
    """
    first, last = tl.min(tl.min(bucket, 1), 0), tl.max(tl.max(bucket, 1), 0)
    if entries is not None:
        first, last = tl.maximum(first, 0), tl.minimum(last, entries - 1)
    for number in range(first, last + 1):
        add_to_entry(dtable_ptr + number, tl.sum(tl.where(bucket == number, ds, 0.0), 1))


@triton.jit
def add_gradients_of_runs(ds, dtable_ptr, buckets_ptr, until_ptr, at, smallest, largest):
    """The same, one run of codes with the same bucket after another. at: the codes of the scores."""
    code = smallest
    while code <= largest:
        last = tl.minimum(tl.load(until_ptr + code), largest)
        is_of_run = (at >= code) & (at <= last)
        add_to_entry(dtable_ptr + tl.load(buckets_ptr + code), tl.sum(tl.where(is_of_run, ds, 0.0), 1))
        code = last + 1


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
    table_sums, ds, dtable_ptr, buckets_ptr, changes, first_q, first_k, q, k, q_len, k_len,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of a tile to this program's own copy of the table, or to `table_sums`, which it returns.

    table_sums: `(the gradients by query, [TILE_M], of the last tiles that have only one bucket, that bucket)`. They are
    added to the copy when another bucket follows, so most tiles need no sum over the queries, for which warps wait.
    """
    sums, bucket = table_sums
    smallest, largest = codes_of_tile(first_q, first_k, q_len, k_len, TILE_M, TILE_N)
    code, is_shared = shared_bucket(changes, smallest, largest)
    if is_shared:
        own = tl.load(buckets_ptr + code)
        if own != bucket:
            add_to_entry(dtable_ptr + bucket, sums)
            sums = tl.zeros_like(sums)
        sums += tl.sum(ds, 1)
        bucket = own
    else:
        at = code_differences(changes, q, k, q_len, k_len, False)
        add_gradients_of_runs(ds, dtable_ptr, buckets_ptr, changes.until_ptr, at, smallest, largest)
    return sums, bucket

"""A relative position table, with entries added to scores: the entries of a tile of scores, and their gradients.

Every score has a code, from the relative position of query and key; every code a bucket; every bucket and head an entry
of the table. The host expands the table to an entry for each code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.availability import INTERPRETED
from sparseflash.backends.triton.changes.kind import Kind, Memory, Request
from sparseflash.backends.triton.device_functions.loads import along_keys, along_queries, token_numbers
from sparseflash.backends.triton.launch.launches import SOME_PARTS

if TYPE_CHECKING:
    from sparseflash.backends.triton.portable.learned import Call

# ---------------------------------------------------------------------- codes that follow from the tokens' numbers


@triton.jit
def begin_runs(CHANGES: tl.constexpr, NUMBER: tl.constexpr, args):
    """`(last code with the bucket of the first code, first code with the bucket of the last code)`.

    Far from the diagonal all scores have one of these two buckets, so a tile there needs no loads to find it.
    """
    until_ptr = args.tensors[1]
    return tl.load(until_ptr), tl.load(until_ptr + args.whole[0])


@triton.jit
def apply_runs(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, read, scores, at, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Adds the entries of the codes; one number for the whole tile if all its codes have the same bucket."""
    q, k = token_numbers(at.first_q, TILE_M), token_numbers(at.first_k, TILE_N)
    values_ptr = args.tensors[0] + tl.cast(at.head, tl.int64) * args.whole[0]
    smallest, largest = codes_of_tile(at, TILE_M, TILE_N)
    code, is_shared = shared_bucket(args, smallest, largest)
    if is_shared:
        scores = scores + tl.load(values_ptr + code).to(tl.float32)
    else:
        codes = codes_of_places(q, k, at, TRANSPOSED)
        scores = scores + entries_at(values_ptr, codes, CHANGES.kinds[NUMBER].COMPILED).to(tl.float32)
    return scores, ()


@triton.jit
def start_runs(CHANGES: tl.constexpr, NUMBER: tl.constexpr, TILE: tl.constexpr):
    """`(sums [TILE] per query, over the last tiles with a single bucket; that bucket)`."""
    return tl.zeros([TILE], tl.float32), 0


@triton.jit
def gradient_runs(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, sums, ds, kept, at, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of a tile to this program's copy of the table, or to the sums if the tile has one bucket.

    The sums are added to the copy when the bucket changes, so most tiles need no sum over queries, which would
    synchronise the warps.
    """
    TILE_M: tl.constexpr = ds.shape[0]
    TILE_N: tl.constexpr = ds.shape[1]
    q, k = token_numbers(at.first_q, TILE_M), token_numbers(at.first_k, TILE_N)
    by_query, bucket = sums
    dtable_ptr, buckets_ptr = own_table(args), args.learned[1]
    smallest, largest = codes_of_tile(at, TILE_M, TILE_N)
    code, is_shared = shared_bucket(args, smallest, largest)
    if is_shared:
        own = tl.load(buckets_ptr + code)
        if own != bucket:
            add_to_entry(dtable_ptr + bucket, by_query)
            by_query = tl.zeros_like(by_query)
        by_query += tl.sum(ds, 1)
        bucket = own
    else:
        codes = codes_of_places(q, k, at, False)
        add_gradients_of_runs(ds, dtable_ptr, buckets_ptr, args.tensors[1], codes, smallest, largest)
    return ds, (by_query, bucket)


@triton.jit
def finish_runs(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, sums, place, first, length, TILE: tl.constexpr, CUT: tl.constexpr
):  # fmt: skip
    add_to_entry(own_table(args) + sums[1], sums[0])


# ---------------------------------------------------------------------- codes of the tokens, read from memory


@triton.jit
def apply_codes(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, read, scores, at, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    values_ptr = args.tensors[0] + tl.cast(at.head, tl.int64) * args.whole[0]
    codes = codes_of_tokens(args, at, TILE_M, TILE_N, TRANSPOSED)
    return scores + entries_at(values_ptr, codes, CHANGES.kinds[NUMBER].COMPILED).to(tl.float32), ()


@triton.jit
def gradient_codes(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, sums, ds, kept, at, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    TILE_M: tl.constexpr = ds.shape[0]
    TILE_N: tl.constexpr = ds.shape[1]
    codes = codes_of_tokens(args, at, TILE_M, TILE_N, False)
    add_table_gradients(ds, own_table(args), entries_at(args.learned[1], codes, CHANGES.kinds[NUMBER].COMPILED), None)
    return ds, sums


# ---------------------------------------------------------------------- both


@triton.jit
def codes_of_places(q, k, at, TRANSPOSED: tl.constexpr):
    """The codes of scores from the token numbers q and k, if codes depend only on the distance."""
    q_codes, k_codes = tl.minimum(q, at.q_len - 1), tl.minimum(k, at.k_len - 1)
    q_codes += at.k_len - 1
    return along_queries(q_codes, TRANSPOSED) - along_keys(k_codes, TRANSPOSED)


@triton.jit
def codes_of_tokens(args, at, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The codes of the scores of a tile: the difference of a number per query and a number per key, from memory."""
    _, q_codes_ptr, k_codes_ptr = args.tensors[:3]
    q, k = token_numbers(at.first_q, TILE_M), token_numbers(at.first_k, TILE_N)
    q_codes, k_codes = tl.minimum(q, at.q_len - 1), tl.minimum(k, at.k_len - 1)
    q_codes, k_codes = tl.load(q_codes_ptr + q_codes), tl.load(k_codes_ptr + k_codes)
    return along_queries(q_codes, TRANSPOSED) - along_keys(k_codes, TRANSPOSED)


@triton.jit
def entries_at(table_ptr, at, COMPILED: tl.constexpr):
    """`table[at]`, with one index per score.

    Inline assembly, because Triton would convert the operands of `tl.load` to a layout for coalesced access, through
    shared memory even in tiles that load nothing.
    """
    DTYPE: tl.constexpr = table_ptr.dtype.element_ty
    if COMPILED:
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
def codes_of_tile(at, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    least_q, most_q = least_and_most(at.first_q, at.q_len, TILE_M)
    least_k, most_k = least_and_most(at.first_k, at.k_len, TILE_N)
    return least_q + (at.k_len - 1) - most_k, most_q + (at.k_len - 1) - least_k


@triton.jit
def shared_bucket(args, smallest, largest):
    first_end, last_start = args.begun
    is_first, is_last = largest <= first_end, smallest >= last_start
    code = tl.where(is_first, 0, tl.where(is_last, args.whole[0] - 1, smallest))
    is_shared = is_first | is_last
    if not is_shared:
        is_shared = tl.load(args.tensors[1] + smallest) >= largest
    return code, is_shared


@triton.jit
def least_and_most(first, length, TOKENS: tl.constexpr):
    """The smallest and the largest token number of a tile; numbers past the end are clamped to the last token."""
    if first.type.is_block():
        return tl.minimum(tl.min(first, 0), length - 1), tl.minimum(tl.max(first, 0), length - 1)
    else:
        return tl.minimum(first, length - 1), tl.minimum(first + TOKENS - 1, length - 1)


@triton.jit
def add_table_gradients(ds, dtable_ptr, bucket, entries):
    """Adds the gradients of a tile to this program's copy of the table, one bucket after another.

    The same thread reads and writes an entry, so no barrier is needed. entries: the size of the table, to skip buckets
    outside of it; None if all buckets are inside.
    """
    first, last = tl.min(tl.min(bucket, 1), 0), tl.max(tl.max(bucket, 1), 0)
    if entries is not None:
        first, last = tl.maximum(first, 0), tl.minimum(last, entries - 1)
    for number in range(first, last + 1):
        add_to_entry(dtable_ptr + number, tl.sum(tl.where(bucket == number, ds, 0.0), 1))


@triton.jit
def add_gradients_of_runs(ds, dtable_ptr, buckets_ptr, until_ptr, at, smallest, largest):
    """As `add_table_gradients`, one run of codes with the same bucket after another. at: the codes of the scores."""
    code = smallest
    while code <= largest:
        last = tl.minimum(tl.load(until_ptr + code), largest)
        is_of_run = (at >= code) & (at <= last)
        add_to_entry(dtable_ptr + tl.load(buckets_ptr + code), tl.sum(tl.where(is_of_run, ds, 0.0), 1))
        code = last + 1


@triton.jit
def add_to_entry(entry_ptr, gradients):
    """Adds the sum of gradients [TILE_M] to an entry of this program's copy of a table."""
    tl.store(entry_ptr, tl.load(entry_ptr) + tl.sum(gradients, 0))


@triton.jit
def own_table(args):
    return args.learned[0] + tl.cast(tl.program_id(0), tl.int64) * args.whole[1]


class TableKind(Kind):
    """Each program of dq_kernel adds gradients to its own copy of one head's entries."""

    def __init__(self, change: Any, request: Request, wanted: Sequence[bool]) -> None:
        self._has_runs, self._dtype = change.until.numel() > 0, request.dtype
        super().__init__({"begin": begin_runs, "apply": apply_runs} if self._has_runs else {"apply": apply_codes})
        self.whole = len(change.buckets), change.table.shape[1]
        self.facts["COMPILED"] = not INTERPRETED  # inline assembly needs a compiler
        if any(wanted):
            self.rows = {"gradient": gradient_codes}
            if self._has_runs:
                self.rows = {"start": start_runs, "gradient": gradient_runs, "finish": finish_runs}
            self.learned = Memory((SOME_PARTS, torch.empty(16, dtype=torch.int32, device="meta")))

    def tensors(self, change: Any, device: torch.device) -> tuple[Tensor, ...]:
        """The entries of codes, `[Hq, C]`; then either the last code of each code's run, int32 `[C + 1]`, or the codes
        of queries and keys. See `scores/relative.py`.
        """
        # In half precision entries have two bytes; the compiler would pass four bytes through shared memory singly.
        values = in_dtype(change.table, self._dtype).index_select(1, change.buckets)
        codes = (change.until,) if self._has_runs else (change.q_codes, change.k_codes)
        return values, *(aligned_start(x.contiguous()) for x in codes)

    def memory(self, change: Any, call: Call, planned: Any) -> Memory:
        if not self.learned.rows:
            return Memory()
        return Memory((call.zeros_of_programs(self.whole[1]), aligned_start(change.buckets.contiguous())))

    def gradients(self, change: Any, call: Call, written: Memory) -> list[Tensor | None]:
        return [call.sums_by_head(written.rows[0]) if written.rows else None, None, None, None, None]


def in_dtype(table: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a table to another dtype. Finite entries are clamped, because -inf would make their scores dead."""
    lowest = torch.finfo(dtype).min
    if torch.finfo(table.dtype).min < lowest:
        table = table.clamp(min=lowest).masked_fill_(table == -torch.inf, -torch.inf)
    return table.to(dtype)

"""The best blocks of each list of `select_blocks`: one program walks the keys of a tile of queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.architecture import architecture_of
from sparseflash.backends.triton.device import capability_of
from sparseflash.backends.triton.device_functions.arithmetic import floor_divide
from sparseflash.backends.triton.device_functions.fp32_split import input_precision
from sparseflash.backends.triton.launcher import launches_of
from sparseflash.masks.fused.tile_scores import loaded_rows, scores_of_blocks

if TYPE_CHECKING:
    from sparseflash.masks.tiling.columns import Columns

_NONE = tl.constexpr(-(2**63))  # no block
_LAST = tl.constexpr(2**31 - 1)
_FEW = 16  # blocks of a list, which are taken one by one: a sort of a tile of 64 columns has 28 steps
# So few rows are one tile, whose program would walk so many columns alone, one tile of them after the other.
_FEW_ROWS, _MANY_COLUMNS = 16, 2048


class Constants(NamedTuple):
    """The constants of a tile of queries: see `tile_scores.scores_of_blocks`."""

    rows: int
    span: int
    causal: bool
    documents: bool
    dim: int
    padded_dim: int
    block_m: int
    block_n: int
    candidates: int
    precision: str
    far: bool


def constants_of(q: Tensor, k: Tensor, of: Columns, bounds: Tensor | None, block_m: int, block_n: int) -> Constants:
    """The constants for tiles of `block_m` rows and `block_n` columns."""
    padded = max(16, 1 << (q.shape[3] - 1).bit_length())
    precision = input_precision(q.dtype)
    far = max(x.shape[2] * x.stride(2) for x in (q, k)) >= 2**31
    return Constants(
        of.rows, of.span, of.causal, bounds is not None, q.shape[3], padded, block_m, block_n,
        max(1, block_n // of.span), precision, far,
    )  # fmt: skip


def columns_of_a_tile(q: Tensor, of: Columns) -> int:
    """Columns that are multiplied at once."""
    if q.shape[3] <= 128 and q.element_size() == 2:
        return min(128, max(64, of.span))
    return 16 if of.rows == 128 and q.shape[3] > 128 and q.element_size() == 4 else 32


def _most_rows(q: Tensor) -> int:
    return 128 if q.shape[3] <= 128 and q.element_size() == 2 else 64


def fits(q: Tensor, of: Columns) -> bool:
    """Whether a GPU's shared memory holds the queries and the keys of a tile."""
    size = 6 if q.dtype == torch.float32 else q.element_size()  # full fp32 is three pieces of two bytes
    tokens = max(of.rows, _most_rows(q)) + columns_of_a_tile(q, of)
    needed = tokens * max(16, 1 << (q.shape[3] - 1).bit_length()) * size
    return needed <= architecture_of(capability_of(q.device)).shared_memory


def is_long_walk(q: Tensor, k: Tensor) -> bool:
    """Whether few rows choose among many columns, as new tokens after a cache do."""
    return q.shape[2] <= _FEW_ROWS and k.shape[2] >= _MANY_COLUMNS


def lists_of_blocks(q: Tensor, k: Tensor, of: Columns, top_k: int, factor: float, bounds: Tensor | None) -> Tensor:
    """int32 `[B, Hq, lists, top_k]`, as `select_blocks` returns them. q and k have the columns of the scores.

    bounds: int32 `[2, rows]`, where the document of each row begins and ends, in keys; or None.
    """
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    (batch, heads, rows, _), (_, kv_heads, cols, _) = q.shape, k.shape
    index = torch.empty(batch, heads, of.lists, top_k, dtype=torch.int32, device=q.device)
    best = 1 << (top_k - 1).bit_length()
    # A few are taken one by one from single columns, of which a tile has many. Otherwise more of them take longer to
    # sort.
    few = of.span == 1 and best <= _FEW
    block_n = 32 if of.span == 1 and not few else columns_of_a_tile(q, of)
    group = max(1, block_n // of.span, best)  # blocks from one merge to the next
    best = best if few else group
    block_m = max(of.rows, min(64, 2048 // best) if of.span == 1 else min(_most_rows(q), 2048 // best))
    constants = *constants_of(q, k, of, bounds, block_m, block_n), group, best
    tiles = -(-rows // block_m)
    _kernel(
        q.device, constants, q.dtype, q.stride()[:3], k.stride()[:3], q.data_ptr() % 16, k.data_ptr() % 16,
        0 if bounds is None else bounds.data_ptr() % 16,
    ).start(
        batch * heads * tiles, q, k, bounds, index, heads, heads // kv_heads, tiles, rows, cols, of.q_len,
        of.k_len - of.q_len, of.row_tokens, of.column_tokens, of.lists, of.blocks, of.sinks, of.near, top_k, factor,
        *q.stride()[:3], *k.stride()[:3], *constants,
    )  # fmt: skip
    return index


@triton.jit
def _ordered(score, block):
    """An int64 for a score and a block, greater for better ones: by score, then by the lower block."""
    score = score + 0.0  # -0 equals 0
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ _LAST, bits)
    return (bits.to(tl.int64) << 32) | (block ^ _LAST).to(tl.int64)


@triton.jit
def _with_blocks(scores, found, mine, LISTS: tl.constexpr, GROUP: tl.constexpr, CANDIDATES: tl.constexpr):
    """The scores of a group of blocks, with the scores of one tile. Of the parts of a block the best counts."""
    if GROUP == CANDIDATES:
        return tl.maximum(scores, found)
    else:
        spread = tl.broadcast_to(found[:, None, :], (LISTS, GROUP // CANDIDATES, CANDIDATES)).reshape(LISTS, GROUP)
        return tl.where(mine[None, :], tl.maximum(scores, spread), scores)


@triton.jit
def _merged(best, added, top_k, LISTS: tl.constexpr, GROUP: tl.constexpr, BEST: tl.constexpr):
    """The BEST highest of two tiles, `[LISTS, BEST]` and `[LISTS, GROUP]`, in descending order; or `top_k` of them."""
    if GROUP == BEST:
        # Of the i-th highest of one and the i-th lowest of the other, the higher ones are the highest of both.
        return tl.sort(tl.maximum(best, tl.sort(added)), descending=True)
    else:
        slot = tl.arange(0, BEST)[None, :]
        merged = tl.full([LISTS, BEST], _NONE, tl.int64)
        for each in range(0, top_k):
            highest = tl.maximum(tl.max(best, 1), tl.max(added, 1))[:, None]
            merged = tl.where(slot == each, highest, merged)
            best = tl.where(best == highest, _NONE, best)
            added = tl.where(added == highest, _NONE, added)
        return merged


@triton.jit(
    do_not_specialize=[
        "heads", "group", "tiles", "rows", "cols", "q_len", "shift", "row_tokens", "column_tokens", "lists", "blocks",
        "sinks", "near", "top_k", "factor",
    ]
)  # fmt: skip
def select_kernel(
    q_ptr, k_ptr,  # [B, Hq, rows, D], [B, Hkv, cols, D]
    bounds_ptr,  # int32 [2, rows]: where the document of each row begins and ends; None without DOCUMENTS
    index_ptr,  # int32 [B, Hq, lists, top_k], written
    heads, group, tiles, rows, cols, q_len, shift, row_tokens, column_tokens, lists, blocks, sinks, near, top_k, factor,
    q_stride_b, q_stride_h, q_stride_n, k_stride_b, k_stride_h, k_stride_n,
    ROWS: tl.constexpr, SPAN: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, D: tl.constexpr,
    PADDED_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CANDIDATES: tl.constexpr,
    PRECISION: tl.constexpr, FAR: tl.constexpr, GROUP: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    """Writes the lists of a tile of queries.

    The BEST blocks so far are in descending order. Others are collected until there are GROUP of them, then both are
    merged.
    """
    LISTS: tl.constexpr = BLOCK_M // ROWS
    PARTS: tl.constexpr = SPAN * CANDIDATES // BLOCK_N  # tiles of keys of a block
    batch_head = tl.program_id(0) // tiles
    batch, head = (batch_head // heads).to(tl.int64), batch_head % heads
    first_row = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M  # if CAUSAL, those with the most keys first
    row = first_row + tl.arange(0, BLOCK_M)
    position = tl.minimum((row + 1) * row_tokens, q_len) - 1 + shift
    q_ptr += batch * q_stride_b + head.to(tl.int64) * q_stride_h
    k_ptr += batch * k_stride_b + (head // group).to(tl.int64) * k_stride_h
    q = loaded_rows(q_ptr, row, rows, q_stride_n, D, PADDED_D, FAR)

    number = first_row // ROWS + tl.arange(0, LISTS)
    first = number * (ROWS * row_tokens)
    last = tl.minimum(first + ROWS * row_tokens, q_len) - 1 + shift
    first += shift
    tokens = SPAN * column_tokens

    end = blocks
    if CAUSAL:
        latest = tl.minimum((first_row + BLOCK_M) * row_tokens, q_len) - 1 + shift
        end = tl.minimum(blocks, tl.where(latest >= 0, latest // tokens + 1, 0))
    origin = 0
    begin, stop = position, position  # not read without DOCUMENTS
    # All rows see the columns before this one. A factor that is not above 0 does not keep the order of scores.
    whole = tl.where(factor > 0, cols, 0)
    if CAUSAL:
        earliest = tl.minimum((first_row + 1) * row_tokens, q_len) - 1 + shift
        whole = tl.minimum(whole, floor_divide(earliest, column_tokens) + 1)
    if DOCUMENTS:
        whole = 0
        begin = tl.load(bounds_ptr + row, mask=row < rows, other=0)
        stop = tl.load(bounds_ptr + rows + row, mask=row < rows, other=0)
        end = tl.minimum(end, (tl.max(stop, 0) + tokens - 1) // tokens)
        origin = tl.load(bounds_ptr + first_row) // tokens // GROUP * GROUP
    best = tl.full([LISTS, BEST], _NONE, tl.int64)
    in_group = tl.arange(0, GROUP)
    for start in range(origin, end, GROUP):
        added = tl.full([LISTS, GROUP], float("-inf"), tl.float32)
        steps = (tl.minimum(GROUP, end - start) + CANDIDATES - 1) // CANDIDATES * PARTS
        whole_steps = tl.minimum(tl.maximum(whole - start * SPAN, 0) // BLOCK_N, steps)
        for step in range(0, whole_steps):
            block = start + step // PARTS * CANDIDATES
            found = scores_of_blocks(
                q, k_ptr, row, first, last, position, begin, stop, start * SPAN + step * BLOCK_N, block, rows, cols,
                blocks, sinks, near, column_tokens, factor, k_stride_n,
                ROWS, SPAN, CAUSAL, DOCUMENTS, D, PADDED_D, BLOCK_M, BLOCK_N, CANDIDATES, PRECISION, FAR, ALL_LIVE=True,
            )  # fmt: skip
            added = _with_blocks(added, found, in_group // CANDIDATES == step // PARTS, LISTS, GROUP, CANDIDATES)
        for step in range(whole_steps, steps):
            block = start + step // PARTS * CANDIDATES
            found = scores_of_blocks(
                q, k_ptr, row, first, last, position, begin, stop, start * SPAN + step * BLOCK_N, block, rows, cols,
                blocks, sinks, near, column_tokens, factor, k_stride_n,
                ROWS, SPAN, CAUSAL, DOCUMENTS, D, PADDED_D, BLOCK_M, BLOCK_N, CANDIDATES, PRECISION, FAR,
            )  # fmt: skip
            added = _with_blocks(added, found, in_group // CANDIDATES == step // PARTS, LISTS, GROUP, CANDIDATES)
        each = tl.broadcast_to(start + in_group[None, :], added.shape)
        best = _merged(
            best, tl.where(added > float("-inf"), _ordered(added, each), _NONE), top_k, LISTS, GROUP, BEST
        )  # fmt: skip

    slot = tl.arange(0, BEST)
    inside = (number < lists)[:, None] & (slot < top_k)[None, :]
    chosen = tl.where(best == _NONE, -1, (best & _LAST).to(tl.int32) ^ _LAST)
    at = (batch_head.to(tl.int64) * lists + number)[:, None] * top_k + slot[None, :]
    tl.store(index_ptr + at, chosen, mask=inside)


_kernel = launches_of(select_kernel, num_warps=8, num_stages=3)

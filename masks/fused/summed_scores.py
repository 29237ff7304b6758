"""Scores of keys, summed over heads, for choices that a group of heads shares: those of an indexer, and weights of
compressed keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.device_functions.fp32_split import input_precision
from sparseflash.backends.triton.device_functions.softmax import LOG2E
from sparseflash.backends.triton.launcher import launches_of
from sparseflash.backends.triton.selected.tiles import pieces, power

if TYPE_CHECKING:
    from sparseflash.masks.tiling.columns import Pool


def summed_scores(
    q: Tensor, k: Tensor, factors: Tensor, begins: Tensor, stops: Tensor, start: int, rows: int, *,
    scale: float | None = None, pool: Pool | None = None,
) -> Tensor:  # fmt: skip
    """fp32 `[B, Hkv, rows, Nk]`, of the `rows` queries from `start` on; h runs over the query heads of a key head:

        sum over h of factors[h, p] * ReLU(q[h, p] . k[s])                 with scale=None: DSA's and QSA's indexers
        sum over h of exp(scale * q[h, p] . k[s] - factors[h, p])          otherwise: NSA's weights, from their lse

    With `pool`, fp32 `[B, Hkv, rows, pool.blocks]`: the weights of blocks.

        q, k: `[B, Hq, Nq, D]` and `[B, Hkv, Nk, D]`, of one dtype.
        factors: `[B, Hq, Nq]`.
        begins, stops: int32 `[Nq]`: the keys of query p are those from `begins[p]` to before `stops[p]`. Weights of
            others are 0; an indexer's scores of others are not written, or 0.
    """
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    (batch, heads, _, dim), (_, kv_heads, cols, _) = q.shape, k.shape
    low, high = pieces(dim)
    narrow = q.element_size() == 2
    block_m, block_n = (128, 128) if narrow and low + high <= 192 else (64, 64) if narrow else (32, 32)
    if pool is None:
        count, parts, lead, columns = cols, 1, 0, block_n
    else:
        count, parts, lead = pool.blocks, pool.parts, pool.pieces - 1
        block_n = max(block_n, power(parts + lead))
        columns = (block_n - lead) // parts  # blocks of a tile
    scores = torch.empty(batch, kv_heads, rows, count, dtype=torch.float32, device=q.device)
    precision = input_precision(q.dtype)
    far = max(x.shape[2] * x.stride(2) for x in (q, k)) >= 2**31
    constants = (
        scale is None, min(low, dim), max(0, dim - low) if high else 0, low, high, block_m, block_n, precision, far,
        pool is not None, parts, lead + 1, columns, block_n // parts,
    )  # fmt: skip
    row_tiles, col_tiles = -(-rows // block_m), -(-count // columns)
    _kernel(
        q.device, constants, q.dtype, factors.dtype, q.stride()[:3], k.stride()[:3], factors.stride(),
        q.data_ptr() % 16, k.data_ptr() % 16, factors.data_ptr() % 16,
    ).start(
        batch * kv_heads * row_tiles * col_tiles, q, k, factors, begins, stops, scores, kv_heads, heads // kv_heads,
        row_tiles, col_tiles, start, rows, cols, count, 1.0 if scale is None else scale * LOG2E.value, *q.stride()[:3],
        *k.stride()[:3], *factors.stride(), *constants,
    )  # fmt: skip
    return scores


@triton.jit
def _rows(x_ptr, offsets, live, FIRST: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    dims = tl.arange(0, PADDED)
    return tl.load(
        x_ptr + offsets[:, None] + (FIRST + dims)[None, :], mask=live[:, None] & (dims < DIM)[None, :], other=0.0
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["kv_heads", "group", "row_tiles", "col_tiles", "start", "rows", "cols", "count", "scale"]
)  # fmt: skip
def summed_scores_kernel(
    q_ptr, k_ptr, factor_ptr,  # [B, Hq, Nq, D], [B, Hkv, cols, D], [B, Hq, Nq]
    begins_ptr, stops_ptr,  # int32 [Nq]
    scores_ptr,  # fp32 [B, Hkv, rows, count], written
    kv_heads, group, row_tiles, col_tiles, start, rows, cols, count, scale,
    q_stride_b, q_stride_h, q_stride_n, k_stride_b, k_stride_h, k_stride_n, f_stride_b, f_stride_h, f_stride_n,
    RELU: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, PADDED_LOW: tl.constexpr, PADDED_HIGH: tl.constexpr,  # pieces of D
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, FAR: tl.constexpr,
    POOLED: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr,  # see `Pool`
    COLUMNS: tl.constexpr, PADDED_COLUMNS: tl.constexpr,  # that a tile writes
):  # fmt: skip
    """Writes a tile of the scores, with its keys in registers or shared memory, one head of queries after another."""
    program = tl.program_id(0)
    col_tile, program = program % col_tiles, program // col_tiles
    row_tile, pair = program % row_tiles, program // row_tiles
    batch, kv_head = (pair // kv_heads).to(tl.int64), pair % kv_heads
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    first_col = col_tile * (COLUMNS * PARTS) - (PIECES - 1)
    col = first_col + tl.arange(0, BLOCK_N)
    is_row, is_col = row < rows, (col >= 0) & (col < cols)
    begin = tl.load(begins_ptr + start + row, mask=is_row, other=2147483647)
    stop = tl.load(stops_ptr + start + row, mask=is_row, other=0)
    some_key = (first_col < tl.max(stop, 0)) & (first_col + BLOCK_N > tl.min(begin, 0))
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if some_key:
        query, key = start + row, col
        if FAR:
            query, key = query.to(tl.int64), key.to(tl.int64)
        k_ptr += batch * k_stride_b + kv_head.to(tl.int64) * k_stride_h
        k_low = _rows(k_ptr, key * k_stride_n, is_col, 0, LOW, PADDED_LOW)
        k_high = k_low
        if HIGH > 0:
            k_high = _rows(k_ptr, key * k_stride_n, is_col, PADDED_LOW, HIGH, PADDED_HIGH)
        q_ptr += batch * q_stride_b
        factor_ptr += batch * f_stride_b
        for each in range(0, group):
            head = (kv_head * group + each).to(tl.int64)
            q_low = _rows(q_ptr + head * q_stride_h, query * q_stride_n, is_row, 0, LOW, PADDED_LOW)
            scores = tl.dot(q_low, k_low.T, input_precision=PRECISION)
            if HIGH > 0:
                q_high = _rows(q_ptr + head * q_stride_h, query * q_stride_n, is_row, PADDED_LOW, HIGH, PADDED_HIGH)
                scores = tl.dot(q_high, k_high.T, scores, input_precision=PRECISION)
            factor = tl.load(factor_ptr + head * f_stride_h + query * f_stride_n, mask=is_row, other=0.0)
            factor = factor.to(tl.float32)
            if RELU:
                total += tl.maximum(scores, 0.0) * factor[:, None]
            else:
                total += tl.exp2(scores * scale - (factor * LOG2E)[:, None])
        total = tl.where((col[None, :] >= begin[:, None]) & (col[None, :] < stop[:, None]), total, 0.0)
    if some_key | (not RELU):
        column = col_tile * COLUMNS + tl.arange(0, PADDED_COLUMNS)
        written = (column < count) & (tl.arange(0, PADDED_COLUMNS) < COLUMNS)
        result = total
        if POOLED:
            result = _pooled(total, BLOCK_M, BLOCK_N // PARTS, PARTS, PIECES)
        to = (pair.to(tl.int64) * rows + row)[:, None] * count + column[None, :]
        tl.store(scores_ptr + to, result, mask=is_row[:, None] & written[None, :])


@triton.jit
def _pooled(total, ROWS: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr):
    """The weights of blocks, `[ROWS, GROUPS]`, from those of their keys; see `Pool`. The last ones are not whole."""
    by_group = total.reshape(ROWS, GROUPS, PARTS)
    number = tl.arange(0, GROUPS)
    result = tl.zeros([ROWS, GROUPS], tl.float32)
    for following in tl.static_range((PARTS + PIECES - 1 + PARTS - 1) // PARTS):  # groups whose keys a block has
        place = following * PARTS + tl.arange(0, PARTS)
        share = tl.minimum(tl.minimum(place + 1, PARTS + PIECES - 1 - place), min(PARTS, PIECES))
        part = tl.sum(by_group * tl.maximum(share, 0).to(tl.float32)[None, None, :], 2)
        if following > 0:
            there = tl.minimum(number + following, GROUPS - 1)
            part = tl.gather(part, tl.broadcast_to(there[None, :], part.shape), 1)
        result += part
    return result


_kernel = launches_of(summed_scores_kernel, num_warps=8, num_stages=3)

"""Scores of keys, summed over heads, for choices that a group of heads shares: those of an indexer, and weights of
compressed keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.device_functions.fp32_split import input_precision
from sparseflash.backends.triton.device_functions.softmax import LOG2E
from sparseflash.backends.triton.launcher import Launch
from sparseflash.blockmask.cache import bounded


def summed_scores(
    q: Tensor, k: Tensor, factors: Tensor, begins: Tensor, stops: Tensor, start: int, rows: int, *,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """fp32 `[B, Hkv, rows, Nk]`, of the `rows` queries from `start` on; h runs over the query heads of a key head:

    sum over h of factors[h, p] * ReLU(q[h, p] . k[s])                 with scale=None: DSA's and QSA's indexers
    sum over h of exp(scale * q[h, p] . k[s] - factors[h, p])          otherwise: NSA's weights, from their lse

    q, k: `[B, Hq, Nq, D]` and `[B, Hkv, Nk, D]`, of one dtype.
    factors: `[B, Hq, Nq]`.
    begins, stops: int32 `[Nq]`: the keys of query p are those from `begins[p]` to before `stops[p]`. Weights of
        others are 0; an indexer's scores of others are not written, or 0.
    """
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    (batch, heads, _, dim), (_, kv_heads, cols, _) = q.shape, k.shape
    scores = torch.empty(batch, kv_heads, rows, cols, dtype=torch.float32, device=q.device)
    padded = max(16, 1 << (dim - 1).bit_length())
    narrow = q.element_size() == 2
    block_m, block_n = (128, 128) if narrow and padded <= 128 else (64, 64) if narrow else (32, 32)
    precision = input_precision(q.dtype)
    far = max(x.shape[2] * x.stride(2) for x in (q, k)) >= 2**31
    constants = scale is None, dim, padded, block_m, block_n, precision, far
    row_tiles, col_tiles = -(-rows // block_m), -(-cols // block_n)
    _kernel(
        constants, q.dtype, factors.dtype, q.stride()[:3], k.stride()[:3], factors.stride(), q.data_ptr() % 16,
        k.data_ptr() % 16, factors.data_ptr() % 16, q.device,
    ).start(
        batch * kv_heads * row_tiles * col_tiles, q, k, factors, begins, stops, scores, kv_heads, heads // kv_heads,
        row_tiles, col_tiles, start, rows, cols, 1.0 if scale is None else scale * LOG2E.value, *q.stride()[:3],
        *k.stride()[:3], *factors.stride(), *constants,
    )  # fmt: skip
    return scores


@bounded(maxsize=64)
def _kernel(constants: tuple[object, ...], *layout: object) -> Launch:
    """The arguments are the key for everything that Triton specialises on: see `Launch.of_all_arguments`."""
    device = layout[-1]
    assert isinstance(device, torch.device)
    return Launch.of_all_arguments(summed_scores_kernel, device, num_warps=8, num_stages=3)


@triton.jit(
    do_not_specialize=["kv_heads", "group", "row_tiles", "col_tiles", "start", "rows", "cols", "scale"]
)  # fmt: skip
def summed_scores_kernel(
    q_ptr, k_ptr, factor_ptr,  # [B, Hq, Nq, D], [B, Hkv, cols, D], [B, Hq, Nq]
    begins_ptr, stops_ptr,  # int32 [Nq]
    scores_ptr,  # fp32 [B, Hkv, rows, cols], written
    kv_heads, group, row_tiles, col_tiles, start, rows, cols, scale,
    q_stride_b, q_stride_h, q_stride_n, k_stride_b, k_stride_h, k_stride_n, f_stride_b, f_stride_h, f_stride_n,
    RELU: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Writes a tile of the scores, with its keys in registers or shared memory, one head of queries after another."""
    program = tl.program_id(0)
    col_tile, program = program % col_tiles, program // col_tiles
    row_tile, pair = program % row_tiles, program // row_tiles
    batch, kv_head = (pair // kv_heads).to(tl.int64), pair % kv_heads
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    col = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < rows
    begin = tl.load(begins_ptr + start + row, mask=is_row, other=2147483647)
    stop = tl.load(stops_ptr + start + row, mask=is_row, other=0)
    some_key = (col_tile * BLOCK_N < tl.max(stop, 0)) & ((col_tile + 1) * BLOCK_N > tl.min(begin, 0))
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if some_key:
        query, key = start + row, col
        if FAR:
            query, key = query.to(tl.int64), key.to(tl.int64)
        dims = tl.arange(0, PADDED_D)
        k_ptr += batch * k_stride_b + kv_head.to(tl.int64) * k_stride_h
        k = tl.load(
            k_ptr + (key * k_stride_n)[None, :] + dims[:, None], mask=(col < cols)[None, :] & (dims < D)[:, None],
            other=0.0,
        )  # fmt: skip
        q_ptr += batch * q_stride_b
        factor_ptr += batch * f_stride_b
        for each in range(0, group):
            head = (kv_head * group + each).to(tl.int64)
            q = tl.load(
                q_ptr + head * q_stride_h + (query * q_stride_n)[:, None] + dims[None, :],
                mask=is_row[:, None] & (dims < D)[None, :], other=0.0,
            )  # fmt: skip
            factor = tl.load(factor_ptr + head * f_stride_h + query * f_stride_n, mask=is_row, other=0.0)
            factor = factor.to(tl.float32)
            scores = tl.dot(q, k, input_precision=PRECISION)
            if RELU:
                total += tl.maximum(scores, 0.0) * factor[:, None]
            else:
                total += tl.exp2(scores * scale - (factor * LOG2E)[:, None])
        total = tl.where((col[None, :] >= begin[:, None]) & (col[None, :] < stop[:, None]), total, 0.0)
    if some_key | (not RELU):
        to = (pair.to(tl.int64) * rows + row)[:, None] * cols + col[None, :]
        tl.store(scores_ptr + to, total, mask=is_row[:, None] & (col < cols)[None, :])

"""A decay with the distance of query and key, linear (ALiBi) or logarithmic, with a slope for each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.changes.kind import Kind, Request
from sparseflash.backends.triton.device_functions.loads import along_keys, along_queries, token_numbers
from sparseflash.backends.triton.device_functions.softmax import LN2

if TYPE_CHECKING:
    from sparseflash.backends.triton.portable.learned import Call


@triton.jit
def apply(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, read, scores, at, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Subtracts the slope times the distance."""
    slope = tl.load(args.tensors[0] + at.head).to(tl.float32)
    apart = distances(
        at.first_q, at.first_k, at.q_len, at.k_len, TILE_M, TILE_N, CHANGES.kinds[NUMBER].IS_LOG, TRANSPOSED
    )  # fmt: skip
    # An explicit fma: the compiler could fuse either of two products with the subtraction, so the forward and the
    # backward could round a steep decay differently. In fp32, weights of 1 were off by 2^-15.
    return tl.fma(-slope, apart, scores), ()


@triton.jit
def distances(
    first_q, first_k, q_len, k_len,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, IS_LOG: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The distance of query and key, or log(1 + distance). The last query is aligned with the last key.

    Positions are taken relative to a token of the tile while they are integers, because fp32 cannot represent all
    positions above 2^24. Then one fp32 subtraction per score is exact up to the rounding of the distance itself. The
    reference token is the first of the tile that a program holds, which is never gathered.
    """
    q, k = token_numbers(first_q, TILE_M) + (k_len - q_len), token_numbers(first_k, TILE_N)
    start = first_k if TRANSPOSED else first_q + (k_len - q_len)
    query, key = (q - start).to(tl.float32), (k - start).to(tl.float32)
    apart = tl.abs(along_queries(query, TRANSPOSED) - along_keys(key, TRANSPOSED))
    if IS_LOG:
        return tl.log2(1.0 + apart) * LN2
    else:
        return apart


@triton.jit
def start(CHANGES: tl.constexpr, NUMBER: tl.constexpr, TILE: tl.constexpr):
    """A sum per query for the gradient of the slope."""
    return tl.zeros([TILE], tl.float32)


@triton.jit
def gradient(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, sums, ds, kept, at, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds to the gradient of the slope."""
    TILE_M: tl.constexpr = ds.shape[0]
    TILE_N: tl.constexpr = ds.shape[1]
    apart = distances(at.first_q, at.first_k, at.q_len, at.k_len, TILE_M, TILE_N, CHANGES.kinds[NUMBER].IS_LOG, False)
    sums += -tl.sum(ds * apart, 1)
    return ds, sums


@triton.jit
def finish(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, sums, place, first, length, TILE: tl.constexpr, CUT: tl.constexpr
):  # fmt: skip
    """Writes each query's part of the gradient of the slope."""
    tl.store(args.learned[0] + place * TILE + tl.arange(0, TILE), sums)


class DistanceKind(Kind):
    """A decay. Each program of dq_kernel writes a part of the slope's gradient for each of its queries."""

    def __init__(self, change: Any, request: Request, wanted: Sequence[bool]) -> None:
        super().__init__({"apply": apply})
        self.facts["IS_LOG"] = bool(change.is_log)
        if any(wanted):
            self.rows = {"start": start, "gradient": gradient, "finish": finish}
            self.learned_rows = (torch.empty(16, dtype=torch.float32, device="meta"),)

    def tensors(self, change: Any, device: torch.device) -> tuple[Tensor, ...]:
        return (aligned_start(change.slopes.contiguous()),)

    def memory(self, change: Any, call: Call, planned: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return ((call.empty_of_queries(),) if self.learned_rows else ()), ()

    def gradients(
        self, change: Any, call: Call, rows: Sequence[Tensor], columns: Sequence[Tensor]
    ) -> list[Tensor | None]:
        if not rows:
            return [None]
        return [call.sums_by_head(rows[0].sum(1, keepdim=True)).squeeze(1)]

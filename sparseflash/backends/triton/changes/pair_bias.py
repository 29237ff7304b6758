"""A bias for every pair (query, key), added to its score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.changes.kind import Kind, Memory, Request
from sparseflash.backends.triton.device_functions.loads import along_keys, along_queries, token_numbers
from sparseflash.backends.triton.launch.gradient_sums import over_shared
from sparseflash.limits import FAR

if TYPE_CHECKING:
    from sparseflash.backends.triton.portable.learned import Call
    from sparseflash.backends.triton.schedule.plan import Plan


@triton.jit
def load(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, at,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """A tile of the bias, with 0 for queries past the sequence's length: their biases need not be finite, and full
    tiles have no mask that would exclude them.
    """
    q, k = token_numbers(at.first_q, TILE_M), token_numbers(at.first_k, TILE_N)
    CUT: tl.constexpr = at.q_length is not None
    q_stop = at.q_length if CUT else at.q_len
    pointers = pointers_of_pairs(
        args.tensors[0], args.numbers[0], at.batch, at.head, at.first_q, at.first_k, TILE_M, TILE_N, TRANSPOSED
    )  # fmt: skip
    if MASKED:
        inside = along_queries(q < q_stop, TRANSPOSED) & along_keys(k < at.k_len, TRANSPOSED)
        return tl.load(pointers, mask=inside, other=0.0)
    elif CUT:
        return tl.load(pointers, mask=along_queries(q < q_stop, TRANSPOSED), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def apply(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, read, scores, at, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    return scores + read.to(tl.float32), ()


@triton.jit
def gradient(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, sums, ds, kept, at, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    store_pair_gradients(
        ds, args.learned[0], args.numbers[1], at.batch, at.head, at.first_q, at.first_k, at.q_len, at.k_len, MASKED
    )  # fmt: skip
    return ds, sums


@triton.jit
def pointers_of_pairs(
    ptr, strides, batch, head, first_q, first_k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TRANSPOSED: tl.constexpr
):  # fmt: skip
    """Pointers to a tile of a tensor [B, Hq, Nq, Nk] with the given strides.

    The start is a 64-bit scalar and the offsets fit in 32 bits, unless tokens are gathered or `strides_of_pairs` added
    a fifth number: 64-bit offsets for all scores would need more registers than a thread has.
    """
    rows, columns = tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    if len(strides) > 4:
        rows = tl.cast(rows, tl.int64)
    start = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    if first_q.type.is_block():
        rows = tl.cast(first_q, tl.int64)
    else:
        start += tl.cast(first_q, tl.int64) * strides[2]
    if first_k.type.is_block():
        columns = tl.cast(first_k, tl.int64)
    else:
        start += tl.cast(first_k, tl.int64) * strides[3]
    return ptr + start + (
        along_queries(rows * strides[2], TRANSPOSED) + along_keys(columns * strides[3], TRANSPOSED)
    )  # fmt: skip


@triton.jit
def store_pair_gradients(
    ds, dpairs_ptr, strides, batch, head, first_q, first_k, q_len, k_len, MASKED: tl.constexpr
):  # fmt: skip
    """Writes the gradients of a tile of scores to a tensor `[B, Hq, Nq, Nk]` with the given strides."""
    TILE_M: tl.constexpr = ds.shape[0]
    TILE_N: tl.constexpr = ds.shape[1]
    at = pointers_of_pairs(dpairs_ptr, strides, batch, head, first_q, first_k, TILE_M, TILE_N, False)
    ds = ds.to(dpairs_ptr.dtype.element_ty)
    if MASKED:
        q, k = token_numbers(first_q, TILE_M), token_numbers(first_k, TILE_N)
        tl.store(at, ds, mask=(q < q_len)[:, None] & (k < k_len)[None, :])
    else:
        tl.store(at, ds)


class PairBiasKind(Kind):
    """A pair bias. dq_kernel writes the gradient of every score of a live tile."""

    def __init__(self, change: Any, request: Request, wanted: Sequence[bool]) -> None:
        super().__init__({"load": load, "apply": apply})
        self._block = request.block
        self.numbers = (strides_of_pairs(strides_where_shared(readable(change.values))),)
        if any(wanted):
            self.rows = {"gradient": gradient}
            self.numbers_of_rows = (strides_of_all_pairs(request),)
            dtype = dtype_of_parts(change.values, request[:4])
            self.learned = Memory((torch.empty(16, dtype=dtype, device="meta"),))

    def tensors(self, change: Any, device: torch.device) -> tuple[Tensor, ...]:
        return (readable(change.values),)

    def planned(self, plan: Plan) -> bool:
        return are_all_live(plan, self._block) if self.learned.rows else False

    def memory(self, change: Any, call: Call, planned: bool) -> Memory:
        if not self.learned.rows:
            return Memory()
        return Memory((call.empty_of_pairs(self.learned.rows[0].dtype, all_live=planned),))

    def gradients(self, change: Any, call: Call, written: Memory) -> list[Tensor | None]:
        return [over_shared(written.rows[0], change.values) if written.rows else None]


def readable(values: Tensor) -> Tensor:
    """The same values with a key stride of 1, and a query stride below `FAR` unless there are at least `FAR` keys."""
    if (values.stride(-1) != 1 and values.shape[-1] != 1) or values.shape[-1] < FAR <= values.stride(-2):
        values = values.contiguous()
    return aligned_start(values)


def strides_where_shared(values: Tensor) -> tuple[int, ...]:
    """The strides of all dimensions, 0 for dimensions of size 1, which are broadcast."""
    return tuple(0 if n == 1 else stride for n, stride in zip(values.shape, values.stride()))


def strides_of_pairs(strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of batch, head, query and key as the kernels take them. The key stride is 1 or 0.

    A fifth number is added if the query stride is large enough for offsets in a tile to overflow 32 bits.
    """
    return strides if strides[2] < FAR else (*strides, 1)


def strides_of_all_pairs(request: Request) -> tuple[int, ...]:
    return strides_of_pairs(torch.empty(request[:4], device="meta").stride())


def are_all_live(plan: Plan, block: tuple[int, int] | None) -> bool:
    """Whether the kernels write the gradient of every pair, so that memory need not be zeroed."""
    return block is not None and plan.has_every_tile(block)


def dtype_of_parts(values: Tensor, parts: Sequence[int]) -> torch.dtype:
    """The dtype in which kernels write gradients of shape `parts`: fp32 if several are summed, else `values.dtype`."""
    return values.dtype if values.shape == tuple(parts) else torch.float32

"""A bias for each key, added to all scores of the key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.changes.kind import Kind, Memory, Request
from sparseflash.backends.triton.changes.pair_bias import readable, strides_where_shared
from sparseflash.backends.triton.device_functions.loads import along_keys, token_numbers
from sparseflash.backends.triton.launch.gradient_sums import over_shared
from sparseflash.backends.triton.launch.launches import SOME_PARTS

if TYPE_CHECKING:
    from sparseflash.backends.triton.portable.learned import Call


@triton.jit
def apply(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, read, scores, at, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    strides = args.numbers[0]
    k = token_numbers(at.first_k, TILE_N)
    start = tl.cast(at.batch, tl.int64) * strides[0] + tl.cast(at.head, tl.int64) * strides[1]
    values = tl.load(args.tensors[0] + start + k * strides[2], mask=k < at.k_len, other=0.0)
    return scores + along_keys(values.to(tl.float32), TRANSPOSED), ()


@triton.jit
def start(CHANGES: tl.constexpr, NUMBER: tl.constexpr, TILE: tl.constexpr):
    return tl.zeros([TILE], tl.float32)


@triton.jit
def gradient(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, sums, ds, kept, at, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    sums += tl.sum(ds, 1)
    return ds, sums


@triton.jit
def finish(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, sums, place, first, length, TILE: tl.constexpr, CUT: tl.constexpr
):  # fmt: skip
    if CUT:
        sums = tl.where(first + tl.arange(0, TILE) < length, sums, 0.0)
    tl.store(args.learned[0] + place * TILE + tl.arange(0, TILE), sums)


class KeyBiasKind(Kind):
    """A key bias. dk_dv_kernel writes the gradients of its keys, once for each query head."""

    def __init__(self, change: Any, request: Request, wanted: Sequence[bool]) -> None:
        super().__init__({"apply": apply})
        self.numbers = (strides_where_shared(readable(change.values)),)
        if any(wanted):
            self.columns = {"start": start, "gradient": gradient, "finish": finish}
            self.learned = Memory(columns=(SOME_PARTS,))

    def tensors(self, change: Any, device: torch.device) -> tuple[Tensor, ...]:
        return (readable(change.values),)

    def memory(self, change: Any, call: Call, planned: Any) -> Memory:
        return Memory(columns=(call.empty_of_keys(),)) if self.learned.columns else Memory()

    def gradients(self, change: Any, call: Call, written: Memory) -> list[Tensor | None]:
        return [over_shared(call.sums_by_key(written.columns[0]), change.values) if written.columns else None]

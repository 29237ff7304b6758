"""A bias for each key in the Hopper kernels. At every call a kernel converts the biases to the units of scores and pads
each row of biases to whole tiles of keys.

The forward adds biases by a matrix instruction, as if q and k had more channels: there a key has its bias, split into
three pieces of 8 bits, and a query has ones. In the backward, where rows of scores are keys, the bias is part of an
addition that is needed anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.changes.hopper import Given, HopperKind, HopperRequest
from sparseflash.backends.triton.device_functions.fp32_split import PIECE_COUNT, split
from sparseflash.backends.triton.hopper import configs
from sparseflash.backends.triton.hopper.descriptors import described_channels
from sparseflash.backends.triton.hopper.gluon_api import accumulator, async_load
from sparseflash.backends.triton.hopper.record import received
from sparseflash.backends.triton.hopper.rows import finite_product
from sparseflash.backends.triton.hopper.scores import number_of, read_later, store_sums, sums_of_threads
from sparseflash.backends.triton.launch.gradient_sums import over_shared
from sparseflash.backends.triton.launch.launches import launch_of, like, one_number_of
from sparseflash.backends.triton.launcher import BoundLaunch

if TYPE_CHECKING:
    from sparseflash.backends.triton.hopper.learned import HopperCall

KEYS = gl.constexpr(configs.BLOCK[1])  # of a tile
CHANNELS = gl.constexpr(configs.CHANNELS)
ROWS = gl.constexpr(configs.ROWS)
PIECES = gl.constexpr(PIECE_COUNT)
_BLOCK = 1024  # keys of a program of `biases_kernel`


@triton.jit(do_not_specialize=["factor", "k_len", "width", "programs_of_row"])
def biases_kernel(
    values_ptr, biases_ptr,  # [rows, width] contiguous; [rows, whole tiles], written: fp32, or their PIECES in bf16
    factor,
    k_len, width, programs_of_row,  # width: k_len, or 1 if all keys share a number
    IN_PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The bias of every key, 0 past the last key. If IN_PIECES: [rows, PIECES, whole tiles]."""
    row, number = tl.program_id(0) // programs_of_row, tl.program_id(0) % programs_of_row
    key = number * BLOCK + tl.arange(0, BLOCK)
    start_ptr = values_ptr + tl.cast(row, tl.int64) * width
    values = tl.load(start_ptr + tl.where(width == 1, 0, key), mask=key < k_len, other=0.0)
    size = tl.cdiv(k_len, KEYS) * KEYS
    biases = finite_product(values.to(tl.float32), factor)
    if IN_PIECES:
        target = biases_ptr + (tl.cast(row, tl.int64) * (PIECES * size) + key)
        is_finite = tl.abs(biases) < float("inf")  # other numbers would have pieces that are NaN
        first, second, third = split(tl.where(is_finite, biases, 0.0), tl.bfloat16)
        tl.store(target, tl.where(is_finite, first, biases.to(tl.bfloat16)), mask=key < size)
        tl.store(target + size, second, mask=key < size)
        tl.store(target + 2 * size, third, mask=key < size)
    else:
        tl.store(biases_ptr + (tl.cast(row, tl.int64) * size + key), biases, mask=key < size)


# ---------------------------------------------------------------------- the forward


@gluon.jit
def hopper_buffers(
    CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    _, _, _, desc = args
    dtype: gl.constexpr = desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHANNELS, BLOCK_N], dtype)
    return gl.allocate_shared_memory(dtype, [STAGES, CHANNELS, BLOCK_N], LAYOUT)


@gluon.jit
def hopper_load_with_keys(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, buffers, stage, bar, batch, head, first_k):
    _, _, rows_of, desc = args
    async_load(desc, [batch * rows_of[0] + head * rows_of[1], 0, first_k], bar, buffers.index(stage))


@gluon.jit
def hopper_multiply(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, buffers, s, stage, Q: gl.constexpr):
    """Adds the biases to the scores, by a product of ones with the pieces of the biases."""
    ones = gl.full([ROWS, CHANNELS], 1.0, gl.bfloat16, layout=Q)
    return warpgroup_mma(ones, buffers.index(stage), accumulator(s), is_async=True)


# ---------------------------------------------------------------------- the backward


@gluon.jit
def hopper_send(
    CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, begun, place, of_tokens, ROWS: gl.constexpr
):  # fmt: skip
    _, _, rows_of, _, _, _ = args
    _, q_len, offset = of_tokens
    batch, head, _, _, first_k = place
    row = batch * rows_of[0] + head * rows_of[1]
    return (row * gl.cdiv(q_len + offset, KEYS) + first_k // KEYS,), ()


@gluon.jit
def hopper_receive(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, step, no_scores):
    tensors, _, _, _, _, _ = args
    bias_ptr = tensors[0] + gl.cast(received(CHANGES, NUMBER, step, 0), gl.int64) * KEYS
    return gl.load(bias_ptr + number_of(KEYS, gl.SliceLayout(1, no_scores.type.layout)))


@gluon.jit
def hopper_apply_masked(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, s, bias):
    """Adds the biases before the mask is applied, because the bias of a dead key need not be finite; none is left for
    `of_rows`.
    """
    return s + bias[:, None], gl.zeros([KEYS], gl.float32, layout=gl.SliceLayout(1, s.type.layout))


@gluon.jit
def hopper_of_rows(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, s, bias, qk_scale):
    return s, bias * qk_scale, bias


@gluon.jit
def hopper_start(CHANGES: gl.constexpr, NUMBER: gl.constexpr, no_scores):
    return sums_of_threads(no_scores)


@gluon.jit
def hopper_gradient_later(
    CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, sums, half_ds, of_tile, step, place, no_sums
):  # fmt: skip
    return sums + sums_of_threads(read_later(half_ds).to(gl.float32))


@gluon.jit
def hopper_finish_head(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, sums, place):
    _, _, _, _, learned, _ = args
    store_sums(learned[0], sums, place)


class KeyBiasOnHopper(HopperKind):
    """`biases_kernel` prepares it at every call, in pieces for the forward."""

    learns = is_added = goes_beside = True
    maxima = "coarse"
    adds = "rows"

    def __init__(self, change: Any, request: HopperRequest, wanted: Sequence[bool]) -> None:
        values = like(readable(change))
        batch, heads, width = values.shape
        size = -(-request.k_len // KEYS.value) * KEYS.value
        in_pieces = not request.backward
        shape = (batch * heads, PIECES.value, size) if in_pieces else (batch * heads, size)
        example = torch.empty(shape, dtype=torch.bfloat16 if in_pieces else torch.float32, device="meta")
        self._biases = one_number_of(example, request.device)
        self.whole = heads if batch > 1 else 0, int(heads > 1)
        programs = -(-size // _BLOCK)
        numbers = {
            "factor": request.units.inverse_unit, "k_len": request.k_len, "width": width, "programs_of_row": programs
        }  # fmt: skip
        self._launch: BoundLaunch = launch_of(
            biases_kernel, {"IN_PIECES": in_pieces, "BLOCK": _BLOCK}, numbers,
            {"values_ptr": values, "biases_ptr": example}, request.device, {}, bound=(), num_warps=4, num_stages=1,
        ).bind(batch * heads * programs)  # fmt: skip
        self.launches = (self._launch,)
        if in_pieces:
            self.bytes_of_key = configs.CHANNELS * torch.bfloat16.itemsize
            self.examples, self.describe = Given((), example), described_channels(example, request.keys)
            self.functions = {
                "buffers": hopper_buffers, "load_with_keys": hopper_load_with_keys, "multiply": hopper_multiply
            }  # fmt: skip
            return
        self.examples, self.sent = Given((example,)), 1
        self.functions = {
            "send": hopper_send, "begin_tile": hopper_receive, "apply_masked": hopper_apply_masked,
            "of_rows": hopper_of_rows,
        }  # fmt: skip
        if any(wanted):
            self.sums = (KEYS.value,)
            self.functions |= {
                "start": hopper_start, "gradient_later": hopper_gradient_later, "finish_head": hopper_finish_head
            }  # fmt: skip

    def tensors(self, change: Any) -> Given:
        biases = torch.empty_like(self._biases)
        self._launch({"values_ptr": readable(change), "biases_ptr": biases})
        return Given((biases,)) if self.describe is None else Given((), biases)

    def gradient(self, change: Any, call: HopperCall, written: Given) -> Tensor | None:
        return None if self.sums is None else over_shared(call.sums_by_key(written.tensors[0]), change.values)


def readable(change: Any) -> Tensor:
    return aligned_start(change.values.contiguous())

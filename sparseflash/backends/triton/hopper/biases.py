"""Biases of keys in the form that the Hopper kernels read: in the units of their scores, each row in whole tiles.

The forward adds them by a matrix instruction, like more channels: keys have the three pieces of a bias, of 8 bits each,
and queries have ones. In the backward, where rows are keys, the bias is part of an addition that is needed anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.device_functions.fp32_split import PIECE_COUNT, split
from sparseflash.backends.triton.hopper.configs import BLOCK
from sparseflash.backends.triton.hopper.rows import finite_product
from sparseflash.backends.triton.launch.examples import like, one_number_of
from sparseflash.backends.triton.launch.launches import launch_of
from sparseflash.backends.triton.launcher import BoundLaunch
from sparseflash.scores.change import Scores

KEYS = tl.constexpr(BLOCK[1])  # of a tile
PIECES = tl.constexpr(PIECE_COUNT)
_BLOCK = 1024  # keys of a program of `biases_kernel`


@triton.jit(do_not_specialize=["factor", "k_len", "width", "programs_of_row"])
def biases_kernel(
    values_ptr, biases_ptr,  # [rows, width] contiguous; [rows, whole tiles], written: fp32, or their PIECES in bf16
    factor,  # into the units of scores.py
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


class Biases:
    """A bias of keys as a kernel reads it, prepared for tensors of one layout."""

    def __init__(self, changes: Scores, k_len: int, factor: float, device: torch.device, *, in_pieces: bool) -> None:
        values = like(key_bias_of(changes))
        batch, heads, width = values.shape
        size = -(-k_len // KEYS.value) * KEYS.value
        shape = (batch * heads, PIECES.value, size) if in_pieces else (batch * heads, size)
        self.example = torch.empty(shape, dtype=torch.bfloat16 if in_pieces else torch.float32, device="meta")
        self._biases = one_number_of(self.example, device)
        # Rows from one batch element or query head to the next, 0 where they share a row.
        self.numbers = {"bias_of_batch": heads if batch > 1 else 0, "bias_of_head": int(heads > 1)}
        programs = -(-size // _BLOCK)
        numbers = {"factor": factor, "k_len": k_len, "width": width, "programs_of_row": programs}
        examples = {"values_ptr": values, "biases_ptr": self.example}
        self.launch: BoundLaunch = launch_of(
            biases_kernel, {"IN_PIECES": in_pieces, "BLOCK": _BLOCK}, numbers, examples, device, {}, bound=(),
            num_warps=4, num_stages=1,
        ).bind(batch * heads * programs)  # fmt: skip

    def __call__(self, changes: Scores) -> dict[str, Tensor]:
        """The kernels' arguments for one call: a descriptor for the forward, a pointer for the backward."""
        biases = torch.empty_like(self._biases)
        self.launch({"values_ptr": key_bias_of(changes), "biases_ptr": biases})
        return {"bias_desc": biases, "biases_ptr": biases}


def key_bias_of(changes: Scores) -> Tensor:
    """The bias of keys, contiguous."""
    return aligned_start(changes.find("key_bias").values.contiguous())


def biases_of(
    changes: Scores | None, k_len: int, factor: float, device: torch.device, *, in_pieces: bool
) -> Biases | None:
    """The prepared bias of keys, in pieces for the forward; None if the score modifications have none."""
    if changes is None or changes.find("key_bias") is None:
        return None
    return Biases(changes, k_len, factor, device, in_pieces=in_pieces)

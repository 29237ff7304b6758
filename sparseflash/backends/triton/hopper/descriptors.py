"""Tensors as the copy engine reads and writes them."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from sparseflash.backends.triton.launcher import Describe
from sparseflash.backends.triton.portable.choice import can_describe, describable_strides
from sparseflash.backends.triton.portable.passes import like


def as_read(x: Tensor) -> Tensor:
    """`x`, or a copy that the copy engine can read."""
    return x if can_describe(x) else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def read_as(x: Tensor) -> Tensor:
    """What `as_read` returns of such a tensor, on the meta device."""
    return like(x) if can_describe(x) else torch.empty(x.shape, dtype=x.dtype, device="meta")


def described_as(x: Tensor, tokens: int, dim: int) -> Describe:
    """The descriptor of `x [B, H, N, D]` in boxes of so many tokens of one head."""
    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[x.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, tokens, dim], element)
    return Describe(x, x.shape, describable_strides(x), [1, 1, tokens, dim], layout)

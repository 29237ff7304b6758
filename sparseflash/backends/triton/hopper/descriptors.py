"""Tensor descriptors of the copy engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from sparseflash.backends.triton.alignment import can_describe, describable_strides
from sparseflash.backends.triton.hopper.configs import CHANNELS
from sparseflash.backends.triton.launch.launches import like
from sparseflash.backends.triton.launcher import Describe


def as_read(x: Tensor) -> Tensor:
    """`x`, or a copy that the copy engine can read."""
    return x if can_describe(x) else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def read_as(x: Tensor) -> Tensor:
    """An example of the result of `as_read(x)`, on the meta device."""
    return like(x) if can_describe(x) else torch.empty(x.shape, dtype=x.dtype, device="meta")


def described_as(x: Tensor, tokens: int, dim: int) -> Describe:
    """The descriptor of `x [B, H, N, D]` in boxes of `tokens` tokens and `dim` channels of one head."""
    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[x.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, tokens, dim], element)
    return Describe(x, x.shape, describable_strides(x), [1, 1, tokens, dim], layout)


def described_rows(x: Tensor, box: Sequence[int], shape: Sequence[int] | None = None) -> Describe:
    """The descriptor of fp32 rows in boxes of this size, not swizzled. shape: the shape as which `x` is viewed."""
    seen = x if shape is None else x.view(*shape)
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return Describe(x, seen.shape, seen.stride(), list(box), plain)


def described_channels(x: Tensor, keys: int) -> Describe:
    """The descriptor of a few channels of all keys `[rows, channels, Nk]`, in boxes of the CHANNELS of a matrix
    instruction; the copy engine pads with zeros.
    """
    box = [1, CHANNELS, keys]
    return Describe(x, x.shape, x.stride(), box, gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16))


def boxes_of(
    tensors: Mapping[str, Tensor], tokens: Mapping[str, int], channels: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, Tensor], dict[str, Describe]]:
    """The tensors of descriptors, and how they are described: boxes of `tokens`, and one or two pieces of channels."""
    found = {f"{name}_desc": (x, tokens[name], channels[name][0]) for name, x in tensors.items()}
    found |= {
        f"{name}_rest_desc": (x, tokens[name], channels[name][1]) for name, x in tensors.items() if channels[name][1]
    }
    return {name: x for name, (x, *_) in found.items()}, {name: described_as(*each) for name, each in found.items()}

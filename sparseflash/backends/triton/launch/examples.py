"""Examples of tensors, which hold a layout but no memory of their own."""

from __future__ import annotations

import torch
from torch import Tensor


def one_number_of(x: Tensor, device: torch.device) -> Tensor:
    """A one-element tensor expanded to the shape of `x`, a template for `torch.empty_like`. x: contiguous.

    `torch.empty` with a size and a dtype takes three times as long.
    """
    return torch.empty(1, dtype=x.dtype, device=device).expand(x.shape)


def like(x: Tensor) -> Tensor:
    """A tensor of the same layout on the meta device."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def empty_like(x: Tensor) -> Tensor:
    """A tensor with the layout of `torch.empty_like(x)`, on the meta device."""
    if torch.ops.aten.is_non_overlapping_and_dense(x):
        return like(x)
    return torch.empty_like(like(x))  # imports sympy, which takes 0.3 seconds or more

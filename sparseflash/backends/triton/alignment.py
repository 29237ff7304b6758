"""Rows that begin at multiples of 16 bytes: what asynchronous copies, tensor descriptors and wide loads can read."""

from __future__ import annotations

from torch import Tensor

_BYTES = 16


def is_aligned(x: Tensor) -> bool:
    """Whether the rows `x[b, h, n]` all begin at multiples of 16 bytes.

    >>> import torch
    >>> x = torch.zeros(1, 1, 8, 72)
    >>> is_aligned(x), is_aligned(x[..., 4:]), is_aligned(x[..., 1:]), is_aligned(torch.zeros(1, 1, 8, 70))
    (True, True, False, False)
    """
    size = x.element_size()
    return x.data_ptr() % _BYTES == 0 and all(
        stride * size % _BYTES == 0 for length, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if length > 1
    )


def aligned(x: Tensor) -> Tensor:
    """`x`, or a copy with some room behind every row if its rows begin anywhere else.

    A kernel that has to read such rows element by element holds an address for each: at D = 64 the forward then spills
    1,000 bytes a thread on Hopper, where it spills none of aligned ones. A copy reads and writes each element once.
    """
    return x if is_aligned(x) else with_aligned_rows(x).copy_(x)


def with_aligned_rows(x: Tensor) -> Tensor:
    """An empty tensor of the same shape whose rows begin at multiples of 16 bytes."""
    dim, numbers = x.shape[-1], _BYTES // x.element_size()
    return x.new_empty(*x.shape[:-1], -(-dim // numbers) * numbers)[..., :dim]


def aligned_start(x: Tensor) -> Tensor:
    """`x`, or a copy if it begins off multiples of 16 bytes: hooks for saved tensors may bring them from anywhere."""
    return x if x.data_ptr() % _BYTES == 0 else x.clone()

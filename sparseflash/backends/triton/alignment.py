"""Rows aligned to 16 bytes, as asynchronous copies, tensor descriptors and wide loads require."""

from __future__ import annotations

from torch import Tensor

from sparseflash.limits import is_near

_BYTES = 16


def is_aligned(x: Tensor) -> bool:
    """Whether all rows `x[b, h, n]` begin at multiples of 16 bytes.

    >>> import torch
    >>> x = torch.zeros(1, 1, 8, 72)
    >>> is_aligned(x), is_aligned(x[..., 4:]), is_aligned(x[..., 1:]), is_aligned(torch.zeros(1, 1, 8, 70))
    (True, True, False, False)
    """
    if x.data_ptr() % _BYTES:
        return False
    size, last = x.element_size(), x.ndim - 1
    for axis, (length, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if axis < last and length > 1 and stride * size % _BYTES:
            return False
    return True


def can_describe(x: Tensor) -> bool:
    """Whether TMA can read the tensor: aligned rows, nothing broadcast."""
    return is_aligned(x) and 0 not in describable_strides(x)


def describable_strides(x: Tensor) -> list[int]:
    """Strides for a descriptor. The stride of a dimension of size 1 is never used, but must be valid."""
    strides = [*x.stride()[:3], 1]
    for axis in range(3):
        if x.shape[axis] == 1:
            strides[axis] = 16
    return strides


def is_readable(x: Tensor) -> bool:
    """Whether the portable kernels can read the tokens `x[b, h, n]` without a copy."""
    return is_near(x) and is_aligned(x)


def readable(x: Tensor) -> Tensor:
    """`x` if the portable kernels can read it; otherwise a copy with rows padded to aligned starts.

    A kernel that reads unaligned rows keeps an address per element, which spills registers.
    """
    return x if is_readable(x) else with_aligned_rows(x).copy_(x)


def with_aligned_rows(x: Tensor) -> Tensor:
    """An empty tensor of the same shape with aligned rows."""
    return with_padded_rows(x)[..., : x.shape[-1]]


def with_padded_rows(x: Tensor) -> Tensor:
    """An empty tensor like `x` whose last dimension includes the padding that aligns the rows."""
    numbers = _BYTES // x.element_size()
    return x.new_empty(*x.shape[:-1], -(-x.shape[-1] // numbers) * numbers)


def aligned_start(x: Tensor) -> Tensor:
    """`x`, or a copy with its strides if its address is not aligned, as can happen after hooks restore a saved tensor.

    >>> import torch
    >>> x = torch.arange(12.0).view(3, 4)[:, 1:3]
    >>> found = aligned_start(x)
    >>> found.tolist() == x.tolist(), found.data_ptr() % 16, found.stride()
    (True, 0, (4, 1))
    """
    if x.data_ptr() % _BYTES == 0:
        return x
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((last + 1,), (1,)).clone().as_strided(x.shape, x.stride())  # `x.clone()` would leave out gaps

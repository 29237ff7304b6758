"""Tensors `[B, N, H, D]`, as FlashAttention, NATTEN and xformers take them."""

from __future__ import annotations

from torch import Tensor

from sparseflash.blockmask.arguments import dense_tensor


def heads_first(x: Tensor, name: str) -> Tensor:
    """`[B, N, H, D]` as `[B, H, N, D]`, without a copy.

    >>> import torch
    >>> heads_first(torch.zeros(2, 100, 4, 16), "q").shape
    torch.Size([2, 4, 100, 16])
    """
    if dense_tensor(x, name).ndim != 4:
        raise ValueError(f"{name} must have shape [batch, tokens, heads, head dim]; got {list(x.shape)}.")
    return x.transpose(1, 2)


def refuse_unless(usual: bool, name: str, wanted: str, got: object) -> None:
    """Raises ValueError for an argument that the door of a neighbour does not take.

    >>> refuse_unless(False, "op", "None: the kernels follow from the GPU and the mask", "cutlass")
    Traceback (most recent call last):
        ...
    ValueError: op must be None: the kernels follow from the GPU and the mask; got 'cutlass'.
    """
    if not usual:
        raise ValueError(f"{name} must be {wanted}; got {got!r}.")

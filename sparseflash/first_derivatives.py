"""Gradients that raise an error when they are differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.autograd import Function


def first_derivatives(refusal: str, backward: Callable[..., tuple[Any, ...]], *tensors: Any) -> tuple[Any, ...]:
    """`backward(*tensors)`; a derivative of the results raises NotImplementedError(refusal).

    >>> x = torch.ones(2, requires_grad=True)
    >>> (y,) = first_derivatives("no gradients of gradients", lambda x: (2 * x,), x)
    >>> torch.autograd.grad(y.sum(), x)
    Traceback (most recent call last):
    NotImplementedError: no gradients of gradients

    For the backward of an autograd function. PyTorch's `once_differentiable` raises in `backward()` only:
    `torch.autograd.grad(..., inputs)` skips the node that raises, and silently leaves these gradients out.
    """
    if not torch.is_grad_enabled():
        return backward(*tensors)
    return _Refused.apply(refusal, backward, *tensors)  # type: ignore[no-any-return, no-untyped-call]


class _Refused(Function):
    @staticmethod
    def forward(ctx: Any, refusal: str, backward: Callable[..., tuple[Any, ...]], *tensors: Any) -> tuple[Any, ...]:
        ctx.refusal = refusal
        return backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise NotImplementedError(ctx.refusal)

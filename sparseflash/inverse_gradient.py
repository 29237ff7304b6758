"""Moves of tokens, between ranks or to other places; their gradients take the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

Move = Callable[[Tensor], Tensor]


def apply_with_inverse(move: Move, inverse: Move, x: Tensor) -> Tensor:
    """`move(x)`; backward applies `inverse` to the gradient.

    >>> import torch
    >>> x = torch.arange(3.0, requires_grad=True)
    >>> moved = apply_with_inverse(lambda x: x.roll(1), lambda x: x.roll(-1), x)
    >>> torch.autograd.grad(moved, x, torch.tensor([1.0, 2.0, 3.0]))
    (tensor([2., 3., 1.]),)
    """
    moved: Tensor = _WithInverse.apply(move, inverse, x)  # type: ignore[no-untyped-call]
    return moved


class _WithInverse(Function):
    @staticmethod
    def forward(ctx: Any, move: Move, inverse: Move, x: Tensor) -> Tensor:
        ctx.move, ctx.inverse = move, inverse
        return move(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        # Again with a gradient: a loss may contain gradients.
        return None, None, apply_with_inverse(ctx.inverse, ctx.move, gradients[0])

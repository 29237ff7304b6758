"""Gathers whose gradients are gathers too: scatters add in no fixed order."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class Permute(torch.autograd.Function):
    """x[:, order]; inverse undoes the order."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return x.index_select(1, order)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.inverse = inputs[2]  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(1, ctx.inverse), None, None  # type: ignore[attr-defined]


class GatherGroups(torch.autograd.Function):
    """x[groups], with `filler` in shorter groups. Each row of x is in at most one group.

    x: [M, W]. groups: int64 [I, K], M for no row. place: `places_in_groups(groups, M)`. Returns [I, K, W].
    """

    @staticmethod
    def forward(x: Tensor, groups: Tensor, place: Tensor, filler: float) -> Tensor:
        return torch.cat([x, x.new_full((1, x.shape[1]), filler)])[groups]

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor, float], output: Tensor) -> None:
        ctx.place = inputs[2]  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        nothing = gradient.new_zeros(1, gradient.shape[-1])
        return torch.cat([gradient.flatten(0, 1), nothing])[ctx.place], None, None, None  # type: ignore[attr-defined]


def inverse_permutation(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def places_in_groups(groups: Tensor, count: int) -> Tensor:
    places = torch.full((count + 1,), groups.numel(), device=groups.device)
    # Entries without a row write to entry `count`, which is cut off.
    return places.scatter_(0, groups.flatten(), torch.arange(groups.numel(), device=groups.device))[:count]

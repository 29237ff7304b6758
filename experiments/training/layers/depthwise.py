"""A depthwise convolution whose gradient costs about as much as its value.

Left to torch.compile, the gradient of a window's weights took a quarter of a training step: one reduction over all
tokens for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def depthwise(x: Tensor, weight: Tensor, side: int | None = None) -> Tensor:
    """The weighted sum of each token's neighbours, feature by feature.

    >>> depthwise(torch.tensor([[[1.0], [2.0], [4.0]]]), torch.tensor([[1.0], [10.0], [100.0]])).flatten().tolist()
    [210.0, 421.0, 42.0]

    x: [B, N, W]; beyond its ends all is 0. weight: [window, W], or [window * window, W] of square images with this
    side, whose pixels follow row by row.
    """
    return _Depthwise.apply(x, weight, side)  # type: ignore[no-any-return,no-untyped-call]


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, side: int | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.side = side
        return _sum(x, weight, side)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        of_weight = weight_gradient(gradient.contiguous(), x.contiguous(), len(weight), ctx.side or 0)
        return _sum(gradient, weight.flip(0), ctx.side), of_weight.to(weight.dtype), None


def _sum(x: Tensor, weight: Tensor, side: int | None) -> Tensor:
    total = torch.zeros_like(x)
    for factor, part in zip(weight, _neighbours(x, len(weight), side), strict=True):
        total = total + factor * part
    return total


def _neighbours(x: Tensor, taps: int, side: int | None) -> Iterator[Tensor]:
    """[B, N, W] for each place of the window: what each token finds there."""
    window, axes, whole = taps, 1, x
    if side is not None:
        window, axes, whole = round(taps**0.5), 2, x.unflatten(1, (side, side))
    padded = F.pad(whole, (0, 0, *(window // 2, window // 2) * axes))
    for starts in product(range(window), repeat=axes):
        part = padded
        for axis, start in enumerate(starts, start=1):
            part = part.narrow(axis, start, whole.shape[axis])
        yield part.reshape(x.shape)


@torch.library.custom_op(
    "experiments::depthwise_weight_gradient",
    mutates_args=(),
    schema="(Tensor gradient, Tensor x, int taps, int side) -> Tensor",
)
def weight_gradient(gradient: Tensor, x: Tensor, taps: int, side: int) -> Tensor:
    """[taps, W] in fp32, in the same bits at every call. gradient, x: [B, N, W], contiguous. side: 0 for sequences."""
    if gradient.is_cuda:
        from experiments.training.layers.depthwise_kernel import launched  # Triton is on Linux alone

        return launched(gradient, x, taps, side)
    return torch.stack([(gradient * part).sum((0, 1)).float() for part in _neighbours(x, taps, side or None)])


@weight_gradient.register_fake
def _(gradient: Tensor, x: Tensor, taps: int, side: int) -> Tensor:
    return x.new_empty(taps, x.shape[-1], dtype=torch.float32)

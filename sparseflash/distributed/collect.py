"""Tokens to ranks and back, differentiable."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from sparseflash.distributed.shards import Shards


def scattered(x: Tensor, dim: int, shards: Shards, rank: int, group: dist.ProcessGroup | None) -> Tensor:
    """The tokens of one rank of an x that every rank has whole; backward gathers the gradient."""
    local: Tensor = _Scatter.apply(x, dim, shards, rank, group)  # type: ignore[no-untyped-call]
    return local


def gathered(x: Tensor, dim: int, shards: Shards, rank: int, group: dist.ProcessGroup | None) -> Tensor:
    """All tokens on every rank; backward takes the rank's tokens of the gradient."""
    whole: Tensor = _Gather.apply(x, dim, shards, rank, group)  # type: ignore[no-untyped-call]
    return whole


def _take(x: Tensor, dim: int, shards: Shards, rank: int) -> Tensor:
    return x.index_select(dim, shards.positions(rank).to(x.device))


def _all(x: Tensor, dim: int, shards: Shards, group: dist.ProcessGroup | None) -> Tensor:
    if shards.ranks == 1:
        return x.clone()
    moved = x.movedim(dim, 0)
    flat = moved.reshape(len(moved), -1).contiguous().view(torch.uint8)  # as bytes: every backend takes every dtype
    most = max(shards.counts)
    padded = flat.new_zeros(most, flat.shape[1])  # all_gather needs equal sizes
    padded[: len(flat)] = flat
    parts = [torch.empty_like(padded) for _ in range(shards.ranks)]
    dist.all_gather(parts, padded, group=group)
    joined = torch.cat([part[:count] for part, count in zip(parts, shards.counts, strict=True)]).view(x.dtype)
    whole = torch.empty_like(joined)
    whole[shards.order.to(x.device)] = joined
    return whole.view(shards.length, *moved.shape[1:]).movedim(0, dim)


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, shards: Shards, rank: int, group: dist.ProcessGroup | None) -> Tensor:
        ctx.given = dim, shards, group
        return _take(x, dim, shards, rank)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dim, shards, group = ctx.given
        return _all(gradients[0], dim, shards, group), None, None, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, shards: Shards, rank: int, group: dist.ProcessGroup | None) -> Tensor:
        ctx.given = dim, shards, rank
        return _all(x, dim, shards, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _take(gradients[0], *ctx.given), None, None, None, None

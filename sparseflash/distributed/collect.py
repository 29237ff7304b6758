"""Tokens to ranks and back, differentiable."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sparseflash.distributed.shards import Shards
from sparseflash.inverse_gradient import apply_with_inverse


def scattered(x: Tensor, dim: int, shards: Shards, rank: int, group: dist.ProcessGroup | None) -> Tensor:
    """The tokens of one rank of a tensor that every rank has whole; backward gathers the gradient."""
    return apply_with_inverse(lambda x: _take(x, dim, shards, rank), lambda x: _all(x, dim, shards, group), x)


def gathered(x: Tensor, dim: int, shards: Shards, rank: int, group: dist.ProcessGroup | None) -> Tensor:
    """All tokens on every rank; backward takes the rank's tokens of the gradient."""
    return apply_with_inverse(lambda x: _all(x, dim, shards, group), lambda x: _take(x, dim, shards, rank), x)


def _take(x: Tensor, dim: int, shards: Shards, rank: int) -> Tensor:
    start = sum(shards.counts[:rank])
    return x.index_select(dim, shards.order_on(x.device)[start : start + shards.counts[rank]])


def _all(x: Tensor, dim: int, shards: Shards, group: dist.ProcessGroup | None) -> Tensor:
    if shards.ranks == 1:
        return x.clone()
    moved = x.movedim(dim, 0)
    # As bytes, because every backend takes every dtype so, and from one dimension, because the stride of a last
    # dimension of size 1 is arbitrary.
    flat = moved.contiguous().view(-1).view(torch.uint8).view(len(moved), -1)
    most = max(shards.counts)
    padded = flat.new_zeros(most, flat.shape[1])  # all_gather needs equal sizes
    padded[: len(flat)] = flat
    parts = [torch.empty_like(padded) for _ in range(shards.ranks)]
    dist.all_gather(parts, padded, group=group)
    joined = torch.cat([part[:count] for part, count in zip(parts, shards.counts, strict=True)]).view(x.dtype)
    return shards.in_sequence(joined, 0).view(shards.length, *moved.shape[1:]).movedim(0, dim)

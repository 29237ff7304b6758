"""Dropout over several ranks: the same weights are dropped as by one process."""

from __future__ import annotations

import operator
from typing import SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor

from sparseflash.distributed.plan import ShardPlan
from sparseflash.distributed.positions import Positions
from sparseflash.dropout import Dropout


def described(seed: SupportsIndex | Tensor | None) -> tuple[str, int | None]:
    """The kind of a seed, and its number; both must be the same on all ranks."""
    if seed is None:
        return "drawn", None
    return ("a tensor", None) if isinstance(seed, Tensor) else ("a number", operator.index(seed))


def of_first_rank(seed: Tensor, plan: ShardPlan) -> Tensor:
    """The seed that the first rank of the group has drawn; the others draw too, so that equal generators stay equal."""
    if plan.ranks > 1:
        group = plan.process_group
        dist.broadcast(seed, dist.get_global_rank(group, 0), group=group)
    return seed


def of_tokens(dropout: Dropout, queries: Positions, keys: Positions) -> Dropout:
    """The dropout for the queries and keys at these positions."""
    device = dropout.seed.device
    return dropout._replace(queries=queries.queries_on(device), groups=keys.groups_on(device))


def of_heads(dropout: Dropout, batch: int, own: slice, heads: int) -> Dropout:
    """The dropout for some of `heads` query heads, with all tokens."""
    device = dropout.seed.device
    numbers = torch.arange(own.start, own.stop, dtype=torch.int32, device=device)
    return dropout._replace(rows=torch.arange(batch, dtype=torch.int32, device=device)[:, None] * heads + numbers)

"""Assigns memory for per-tile results (gradients of a tile bias) if batch elements or heads share the stored tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparseflash.blockmask.streams import ReadyEvent


@dataclass(frozen=True)
class TilePlaces:
    """Copies of a tensor `[B or 1, Hq or 1, tiles, ...]`. Batch elements and heads that share tiles write to different
    copies.

    Two heads share the tiles of the first pattern; the third head has another pattern, so it can use the first copy:

    >>> places = TilePlaces.of(torch.tensor([[0, 0, 1]], dtype=torch.int32), (1, 1, 10))
    >>> places.starts.tolist(), places.copies
    ([0, 10, 0], 2)
    """

    # int64 [B * Hq]: the first tile that each batch element and head writes to, counted over all tiles of all copies.
    starts: Tensor
    copies: int
    ready: ReadyEvent = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ready", ReadyEvent(self.starts))

    @classmethod
    def of(cls, pattern: Tensor, shape: Sequence[int]) -> TilePlaces:
        """pattern: int32 `[B, Hq]`, of a canonical mask. shape: of the tensor. Synchronises with the device."""
        batch, head = (torch.arange(n, device=pattern.device) * (own > 1) for n, own in zip(pattern.shape, shape))
        own = (batch[:, None] * shape[1] + head).view(-1)
        users = own * pattern.numel() + pattern.reshape(-1)  # equal for sharers of a tile; patterns are below B * Hq
        shared, order = torch.sort(users, stable=True)
        copy = torch.empty_like(order)
        copy[order] = torch.arange(len(order), device=order.device) - torch.searchsorted(shared, shared)
        starts = (copy * (shape[0] * shape[1]) + own) * shape[2]
        return cls(starts, int(copy.max()) + 1)

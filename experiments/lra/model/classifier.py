"""The classifier: an encoder, pooling over the live positions, and a head.

Shapes: B sequences, N positions (padded), W width, C classes, T sequences per example (1, or 2 for Retrieval).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experiments.lra.model.encoder import Encoder
from sparseflash import BlockMask

POOLS = ("cls", "first", "mean", "max", "mean+max")


class Head(nn.Sequential):
    """Logits [B, C] of features [B * T, N, W]. towers: sequences per example; two are read as [x, y, x * y, x - y] (the
    arena's "NLI"). pool: "cls" and "first" read position 0; "mean" and "max" all live positions."""

    def __init__(self, width: int, mlp: int, classes: int, towers: int, pool: str) -> None:
        features = width * (2 if pool == "mean+max" else 1) * (1 if towers == 1 else 4)
        super().__init__(nn.Linear(features, mlp), nn.GELU(), nn.Linear(mlp, classes))
        self.towers, self.pool = towers, pool

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        pooled = pool(x, lengths, self.pool)  # [B * T, W]
        if self.towers == 2:
            first, second = pooled[0::2], pooled[1::2]
            pooled = torch.cat([first, second, first * second, first - second], dim=-1)
        logits: Tensor = super().forward(pooled)
        return logits


class Classifier(Encoder):
    """towers, pool: see Head."""

    def __init__(
        self,
        masks: Sequence[BlockMask],
        *,
        classes: int,
        towers: int = 1,
        pool: str,
        width: int,
        mlp: int,
        **sizes: Any,
    ) -> None:
        if pool not in POOLS:
            raise ValueError(f"pool must be one of {', '.join(POOLS)}; got {pool!r}")
        super().__init__(masks, width=width, mlp=mlp, first=int(pool == "cls"), **sizes)
        self.head = Head(width, mlp, classes, towers, pool)

    def forward(self, ids: Tensor, lengths: Tensor, places: Tensor | None = None, padded: bool = True) -> Tensor:
        logits: Tensor = self.head(self.encode(ids, lengths, places, padded), lengths)
        return logits


def pool(x: Tensor, lengths: Tensor, how: str) -> Tensor:
    if how in ("cls", "first"):
        return x[:, 0]
    live = (torch.arange(x.shape[1], device=x.device) < lengths[:, None])[..., None]  # [B, N, 1]
    parts = []
    if "mean" in how:
        parts.append((x * live).sum(1) / lengths[:, None])
    if "max" in how:
        parts.append(x.masked_fill(~live, -math.inf).amax(1))
    return torch.cat(parts, dim=-1)

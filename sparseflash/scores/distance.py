"""A decay with the distance of query and key, linear (ALiBi) or logarithmic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparseflash.scores.change import Change, Learned, Place, Sizes, add_at, floating, per_head


@dataclass(frozen=True, eq=False)
class Distance(Change):
    """Adds `-slope[h] * distance`, or `-slope[h] * log(1 + distance)` if `is_log`."""

    kind = "distance"
    order = 2
    slopes: Tensor  # [Hq]
    is_log: int = 0

    @classmethod
    def of(cls, tensors: Sequence[Tensor], numbers: Sequence[float]) -> Distance:
        return cls(tensors[0], int(numbers[0]))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.slopes,)

    def numbers(self) -> tuple[float, ...]:
        return (self.is_log,)

    def prepared(self, sizes: Sizes) -> Distance:
        per_head(self.slopes, "slopes", sizes)
        return self

    def changed(self, scores: Tensor, at: Place) -> Tensor:
        distance = at.distance.to(scores.dtype)
        slope = self.slopes[at.head].to(scores.dtype)
        return scores - slope * (distance.log1p() if self.is_log else distance)

    def gradient(self, gradient: Tensor, scores: Tensor, changed: Tensor, at: Place, learned: Learned) -> Tensor:
        distance = at.distance.to(gradient.dtype)
        add_at(learned[0], [at.head], -gradient * (distance.log1p() if self.is_log else distance))
        return gradient


def alibi(slopes: Tensor) -> Distance:
    """ALiBi: adds `-slopes[h] * |i + Nk - Nq - j|` to the score of query i and key j in head h.

    >>> import torch
    >>> from sparseflash import attention, masks, scores
    >>> q, k, v = (torch.randn(1, 8, 100, 16) for _ in range(3))
    >>> slopes = 2.0 ** -torch.arange(1, 9)
    >>> attention(q, k, v, masks.causal(100), scores=scores.alibi(slopes)).shape
    torch.Size([1, 8, 100, 16])

    slopes: `[Hq]`, which may be learned. Source: Press, Smith and Lewis, "Train Short, Test Long", ICLR 2022;
    symmetric, and aligned at the bottom right, as in FlashAttention.
    """
    return Distance(_slopes(slopes))


def log_decay(slopes: Tensor) -> Distance:
    """Adds `-slopes[h] * log(1 + distance)` to the score of query i and key j in head h, with `distance = |i + Nk - Nq
    - j|`: before the softmax divides by their sum, weights are multiplied by `(1 + distance)^-slopes[h]`.

    >>> import torch
    >>> log_decay(torch.ones(4)).kind
    'distance'

    slopes: `[Hq]`, which may be learned. Source: Chi et al., "KERPLE", NeurIPS 2022, its logarithmic variant with r2 =
    1.
    """
    return Distance(_slopes(slopes), 1)


def _slopes(slopes: Tensor) -> Tensor:
    slopes = floating(slopes, "slopes")
    if slopes.ndim != 1:
        raise ValueError(f"slopes must have shape [Hq]; got {list(slopes.shape)}.")
    return slopes

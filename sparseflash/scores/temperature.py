"""A temperature for each head or query."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparseflash.scores.change import (
    Change,
    Learned,
    Place,
    Sizes,
    add_at,
    broadcasts,
    floating,
    per_head,
    shared_or_own,
)


@dataclass(frozen=True, eq=False)
class Temperature(Change):
    """Divides scores by `values[b, h, i]`; dimensions of size 1 are shared."""

    kind = "temperature"
    order = 0
    values: Tensor  # [B or 1, Hq or 1, Nq or 1]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def prepared(self, sizes: Sizes) -> Temperature:
        if self.values.ndim == 1:
            per_head(self.values, "temperature", sizes)
            return Temperature(self.values[None, :, None])
        broadcasts(self.values, "temperature", "B, Hq, Nq", sizes[:3], sizes)
        return self

    def changed(self, scores: Tensor, at: Place) -> Tensor:
        indices = shared_or_own(self.values, [at.batch, at.head, at.query])
        return scores / self.values[tuple(indices)].to(scores.dtype)

    def gradient(self, gradient: Tensor, scores: Tensor, changed: Tensor, at: Place, learned: Learned) -> Tensor:
        indices = shared_or_own(self.values, [at.batch, at.head, at.query])
        gradient = gradient / self.values[tuple(indices)].to(gradient.dtype)
        add_at(learned[0], indices, -gradient * changed)
        return gradient

    def applied_to(self, q: Tensor) -> Tensor:
        """`q` divided by the temperature."""
        wide = q.float() if q.element_size() < 4 else q
        return (wide / self.values[..., None].to(wide.dtype)).to(q.dtype)


def temperature(values: Tensor) -> Temperature:
    """Divides the scores of a head, or of a query, by a temperature.

    >>> import torch
    >>> from sparseflash import attention, scores
    >>> q, k, v = (torch.randn(1, 2, 50, 16) for _ in range(3))
    >>> attention(q, k, v, scores=scores.temperature(torch.tensor([0.5, 2.0]))).shape
    torch.Size([1, 2, 50, 16])

    values: `[Hq]`, or `[B or 1, Hq or 1, Nq or 1]`, not 0, which may be learned. The Triton kernels divide the queries
    instead, and round the divided queries and their gradients to the queries' dtype.
    """
    values = floating(values, "temperature")
    if values.ndim not in (1, 3):
        raise ValueError(f"temperature must have shape [Hq] or [B or 1, Hq or 1, Nq or 1]; got {list(values.shape)}.")
    return Temperature(values)

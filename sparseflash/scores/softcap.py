"""A smooth bound on the magnitude of scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflash.scores.change import Change, Learned, Place

_FP32 = torch.finfo(torch.float32)


@dataclass(frozen=True, eq=False)
class Softcap(Change):
    """`cap * tanh(score / cap)`."""

    kind = "softcap"
    order = 1
    cap: float

    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def numbers(self) -> tuple[float, ...]:
        return (self.cap,)

    def changed(self, scores: Tensor, at: Place) -> Tensor:
        return self.cap * (scores / self.cap).tanh()

    def gradient(self, gradient: Tensor, scores: Tensor, changed: Tensor, at: Place, learned: Learned) -> Tensor:
        return gradient * (1.0 - (changed / self.cap) ** 2)


def softcap(cap: float) -> Softcap:
    """Replaces every scaled score s by `cap * tanh(s / cap)`.

    >>> import torch
    >>> from sparseflash import attention, scores
    >>> q, k, v = (torch.randn(1, 2, 50, 16) for _ in range(3))
    >>> attention(q, k, v, scores=scores.softcap(50.0)).shape
    torch.Size([1, 2, 50, 16])

    Source: Bello et al., "Neural Combinatorial Optimization", 2016; Gemma Team, "Gemma 2", 2024.
    """
    if not isinstance(cap, int | float):
        raise TypeError(
            f"cap must be a number; got {cap!r}. For a learned one write scores.function("
            "lambda score, b, h, q, k, cap: cap * torch.tanh(score / cap), cap)."
        )
    cap = float(cap)
    if not _FP32.tiny <= cap <= _FP32.max:
        raise ValueError(f"cap must be positive and finite in fp32; got {cap}.")
    return Softcap(cap)

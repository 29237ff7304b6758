"""Position embeddings: by token index, and by nesting depth.

The index counts the whole sequence, including [CLS] and dropped tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

POSITIONS = ("learned", "sinusoidal", "rotary", "rotary2d", "nested")
_DEEPEST = 31  # for deeper tokens, too


def sinusoids(length: int, width: int) -> Tensor:
    """[N, W]: wavelengths 2 pi to 20,000 pi (Vaswani et al., 2017)."""
    if width % 2:
        raise ValueError(f"sinusoidal positions need an even width; got {width}")
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length)[:, None] * rates  # [N, W / 2]
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1) * math.sqrt(2 / width)


class Brackets(NamedTuple):
    opening: tuple[int, ...]
    closing: tuple[int, ...]


class Nesting(nn.Module):
    """A learned vector for each nesting depth.

    Sparse attention sees only some of the earlier brackets.
    """

    change: Tensor

    def __init__(self, brackets: Brackets, vocabulary: int, width: int) -> None:
        super().__init__()
        change = torch.zeros(vocabulary, dtype=torch.int64)
        change[list(brackets.opening)] = 1
        change[list(brackets.closing)] = -1
        self.register_buffer("change", change, persistent=False)
        self.vectors = nn.Embedding(_DEEPEST + 1, width)
        nn.init.normal_(self.vectors.weight, std=width**-0.5)

    def depths(self, ids: Tensor) -> Tensor:
        change = self.change[ids]
        return (change.cumsum(-1) - change.clamp(min=0)).clamp(0, _DEEPEST)

    def forward(self, depths: Tensor) -> Tensor:
        vectors: Tensor = self.vectors(depths)
        return vectors

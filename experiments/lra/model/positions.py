"""Positions that are added to the embedding: the places of tokens, and how deeply they are nested.

A place is a token's index in its whole sequence, including [CLS], also if tokens before it were left out. Rotary
positions are in experiments/training/layers/rotary.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

POSITIONS = ("learned", "sinusoidal", "rotary", "rotary2d", "nested")
_DEEPEST = 31  # tokens that are nested more deeply get the vector of this depth


def sinusoids(length: int, width: int) -> Tensor:
    """Fixed positions [N, W]: sines and cosines of wavelengths 2 pi to 20,000 pi (Vaswani et al., 2017)."""
    if width % 2:
        raise ValueError(f"sinusoidal positions need an even width; got {width}")
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length)[:, None] * rates  # [N, W / 2]
    # Scaled to the size of the embedding, to which they are added.
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1) * math.sqrt(2 / width)


class Brackets(NamedTuple):
    """Which ids open a nested part of a sequence, and which close one."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]


class Nesting(nn.Module):
    """A learned vector for every depth of nesting, to add to the embedding.

    The depth is a sum over all earlier brackets, of which sparse attention sees only a part.
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
        """The number of brackets open around each of the ids [B, N]; a bracket is not inside itself."""
        change = self.change[ids]
        return (change.cumsum(-1) - change.clamp(min=0)).clamp(0, _DEEPEST)

    def forward(self, depths: Tensor) -> Tensor:
        """Vectors [B, N, W] for depths [B, N]."""
        vectors: Tensor = self.vectors(depths)
        return vectors

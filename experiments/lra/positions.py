"""Where tokens stand: added to the embedding, or as turns of queries and keys; how deeply they are nested.

A place is a token's index in its whole sequence, [CLS] counted, also where tokens before it were left out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

POSITIONS = ("learned", "sinusoidal", "rotary", "rotary2d", "nested")
_LONGEST_TURN = 10_000.0  # 2 pi of these are the tokens of the slowest turn of "rotary" (Su et al., 2021)
_PIXELS = (3.0, 400.0)  # of the fastest and the slowest turn of "rotary2d"
_DEEPEST = 31  # whatever is nested more deeply than this counts as nested so deeply


def sinusoids(length: int, width: int) -> Tensor:
    """Fixed positions [N, W]: sines and cosines of wavelengths 2 pi to 20,000 pi (Vaswani et al., 2017)."""
    if width % 2:
        raise ValueError(f"sinusoidal positions need an even width; got {width}")
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length)[:, None] * rates  # [N, W / 2]
    # Scaled to the size of the embedding, which they are added to.
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1) * math.sqrt(2 / width)


class Turns(nn.Module):
    """The angles by which queries and keys are turned, so that their product knows how far they are apart.

    side: pixels along a side of a square image: half of the turns go with the row, half with the column; None: all go
        with the place in the sequence.
    first: the place of the first pixel.
    """

    rates: Tensor

    def __init__(self, head_dim: int, side: int | None, first: int) -> None:
        super().__init__()
        parts = 2 if side is None else 4
        if head_dim % parts:
            raise ValueError(f"rotary positions need head dims that are multiples of {parts}; got {head_dim}")
        count = head_dim // parts
        rates = _LONGEST_TURN ** -(torch.arange(count) / count) if side is None else plane_rates(head_dim)
        self.register_buffer("rates", rates, persistent=False)
        self.side, self.first = side, first

    def forward(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[B, 1, N, D / 2]` for places `[B, N]`."""
        if self.side is not None:
            pixel = (places - self.first).clamp(min=0)  # [CLS] stands where the first pixel does
            return plane_turn(pixel // self.side, pixel % self.side, self.rates)
        angles = places[..., None] * self.rates
        return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def plane_rates(head_dim: int) -> Tensor:
    """Radians a pixel of each turn of "rotary2d", `[D / 4]`; they are the same for images of every size."""
    if head_dim % 4:
        raise ValueError(f"rotary positions need head dims that are multiples of 4; got {head_dim}")
    count = head_dim // 4
    fastest, slowest = _PIXELS
    return 2 * math.pi / (fastest * (slowest / fastest) ** (torch.arange(count) / max(1, count - 1)))


def plane_turn(row: Tensor, column: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[B, 1, N, D / 2]` for pixels in rows and columns `[B, N]`, with the rates of `plane_rates`."""
    angles = torch.cat([row[..., None] * rates, column[..., None] * rates], dim=-1)
    return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """x `[B, H, N, D]`, feature i and feature i + D / 2 turned together."""
    cosine, sine = turn
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).to(x.dtype)


class Brackets(NamedTuple):
    """Which ids open a nested part of a sequence, and which close one."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]


class Nesting(nn.Module):
    """A learned vector for every depth of nesting, to add to the embedding.

    The depth is a sum over all earlier brackets, of which sparse attention sees a part.
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
        """How many brackets are open around each of the ids [B, N]; a bracket is not within itself."""
        change = self.change[ids]
        return (change.cumsum(-1) - change.clamp(min=0)).clamp(0, _DEEPEST)

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors [B, N, W] of ids [B, N]."""
        vectors: Tensor = self.vectors(self.depths(ids))
        return vectors

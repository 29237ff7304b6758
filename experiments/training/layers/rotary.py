"""Rotary positions: queries and keys are rotated by angles that grow with their place (Su et al., 2021).

So their product depends on how far they are apart. Places are those in a sequence, or those of pixels in a plane.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]  # cosines and sines, each [B, 1, N, D / 2]

_BASE = 10_000.0  # tokens in which the slowest angle of a sequence grows by about 1
_WAVELENGTHS = (3.0, 400.0)  # pixels, of the fastest and the slowest angle of a plane


class RotaryPositions(nn.Module):
    """The angles of tokens by their places in a sequence, or in a square image whose rows follow each other.

    side: pixels along a side of the image: half of the angles grow with the row, half with the column; None: all grow
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
        rates = _BASE ** -(torch.arange(count) / count) if side is None else plane_rates(head_dim)
        self.register_buffer("rates", rates, persistent=False)
        self.side, self.first = side, first

    def forward(self, places: Tensor) -> Rotation:
        """The rotation for places `[B, N]`."""
        if self.side is not None:
            pixel = (places - self.first).clamp(min=0)  # [CLS] stands where the first pixel does
            return plane_rotation(pixel // self.side, pixel % self.side, self.rates)
        angles = places[..., None] * self.rates
        return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def plane_rates(head_dim: int) -> Tensor:
    """Radians a pixel of each angle of a plane, `[D / 4]`; they are the same for images of every size."""
    if head_dim % 4:
        raise ValueError(f"rotary positions need head dims that are multiples of 4; got {head_dim}")
    count = head_dim // 4
    fastest, slowest = _WAVELENGTHS
    return 2 * math.pi / (fastest * (slowest / fastest) ** (torch.arange(count) / max(1, count - 1)))


def plane_rotation(row: Tensor, column: Tensor, rates: Tensor) -> Rotation:
    """The rotation for pixels in rows and columns `[B, N]`, with the rates of `plane_rates`."""
    angles = torch.cat([row[..., None] * rates, column[..., None] * rates], dim=-1)
    return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x `[B, H, N, D]`, feature i and feature i + D / 2 rotated together."""
    cosine, sine = rotation
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).to(x.dtype)

"""Rotary positions: queries and keys are rotated by angles that grow with their place (Su et al., 2021).

So the product of a query and a key depends on the distance between them. Places are positions in a sequence, or pixels
of an image.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sparseflash.nn.rotary import Rotation as Rotation

_BASE = 10_000.0  # tokens over which the slowest angle of a sequence grows by about 1
_WAVELENGTHS = (3.0, 400.0)  # pixels, for the fastest and the slowest angle of an image


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
        rates = line_rates(head_dim) if side is None else plane_rates(head_dim)
        self.register_buffer("rates", rates, persistent=False)
        self.side, self.first = side, first

    def forward(self, places: Tensor) -> Rotation:
        """The rotation for places `[B, N]`."""
        if self.side is not None:
            pixel = (places - self.first).clamp(min=0)  # [CLS] gets the place of the first pixel
            return plane_rotation(pixel // self.side, pixel % self.side, self.rates)
        return line_rotation(places, self.rates)


def line_rates(head_dim: int) -> Tensor:
    """Radians per place of each angle of a sequence, `[D / 2]`."""
    count = head_dim // 2
    return _BASE ** -(torch.arange(count) / count)


def line_rotation(places: Tensor, rates: Tensor) -> Rotation:
    """The rotation for places in a sequence `[B, N]`, with the rates of `line_rates`."""
    angles = places[..., None] * rates
    return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def plane_rates(head_dim: int) -> Tensor:
    """Radians per pixel of each angle of an image, `[D / 4]`; the same for images of every size."""
    if head_dim % 4:
        raise ValueError(f"rotary positions need head dims that are multiples of 4; got {head_dim}")
    count = head_dim // 4
    fastest, slowest = _WAVELENGTHS
    return 2 * math.pi / (fastest * (slowest / fastest) ** (torch.arange(count) / max(1, count - 1)))


def plane_rotation(row: Tensor, column: Tensor, rates: Tensor) -> Rotation:
    """The rotation for pixels in rows and columns `[B, N]`, with the rates of `plane_rates`."""
    angles = torch.cat([row[..., None] * rates, column[..., None] * rates], dim=-1)
    return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)

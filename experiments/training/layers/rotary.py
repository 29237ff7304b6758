from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from sparseflash.nn.rotary import Rotation, line_rates, line_rotation, plane_rates, plane_rotation


class Rotations(NamedTuple):
    """Different ones of queries and keys."""

    queries: Rotation
    keys: Rotation


class RotaryPositions(nn.Module):
    """By positions in a sequence or in a square image (row-major).

    side: of the image: half of the angles grow with the row, half with the column. first: the first pixel's position.
    """

    rates: Tensor

    def __init__(self, head_dim: int, side: int | None, first: int) -> None:
        super().__init__()
        rates = line_rates(head_dim) if side is None else plane_rates(head_dim)
        self.register_buffer("rates", rates, persistent=False)
        self.side, self.first = side, first

    def forward(self, places: Tensor) -> Rotation:
        if self.side is not None:
            pixel = (places - self.first).clamp(min=0)  # [CLS] has the first pixel's position
            return plane_rotation(pixel // self.side, pixel % self.side, self.rates)
        return line_rotation(places, self.rates)

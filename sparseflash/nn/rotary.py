"""Rotary positions: queries and keys are rotated by angles that grow with their positions (Su et al., 2021), so their
product depends on the distance.
"""

from __future__ import annotations

import math
from typing import SupportsFloat

import torch
from torch import Tensor, nn

from sparseflash.blockmask.arguments import dense_tensor, integer

_BASE = 10_000.0  # tokens over which the slowest angle of a sequence grows by about 1
_WAVELENGTHS = (3.0, 400.0)  # pixels, for the fastest and the slowest angle of an image
Rotation = Tensor  # the matrices [[cosine, -sine], [sine, cosine]] of all pairs, [B or 1, 1, N, 2, 2, D / 2], fp32


class Rotary(nn.Module):
    """The rotation of tokens by their positions in a sequence.

    >>> rotation = Rotary(64)(torch.arange(100))
    >>> rotate(torch.randn(2, 4, 100, 64), rotation).shape
    torch.Size([2, 4, 100, 64])

    Args:
        head_dim: D, features of a head, even.
        base: pair i of D / 2 turns by `base ** (-2 * i / D)` radians a token.

    Call it with positions, integers `[N]` or `[B, N]`; `rotate` applies the result. Features i and i + D / 2 are a
    pair, as in Llama. Angles are computed in fp64 at every call: a buffer would be rounded by `model.bfloat16()`.
    """

    def __init__(self, head_dim: int, *, base: float = _BASE) -> None:
        super().__init__()
        _check_head_dim(head_dim, 2)
        if not _is_positive(base):
            raise ValueError(f"base must be a positive number; got {base!r}.")
        self.head_dim, self.base = head_dim, base

    def extra_repr(self) -> str:
        return f"{self.head_dim}, base={self.base:g}"

    def forward(self, positions: Tensor) -> Rotation:
        """The rotation of tokens at `positions`, `[N]` or `[B, N]`."""
        positions = _by_batch(positions)
        return line_rotation(positions, line_rates(self.head_dim, self.base, device=positions.device))


class Rotary2D(nn.Module):
    """The rotation of pixels by their rows and columns, in an image whose rows follow one another.

    >>> rotation = Rotary2D(64, width=32)(torch.arange(32 * 32))
    >>> rotate(torch.randn(2, 4, 1024, 64), rotation).shape
    torch.Size([2, 4, 1024, 64])

    Half of the angles grow with the row, half with the column. The wavelengths suit images of a few hundred pixels a
    side, and do not depend on `width`, so a model can read larger images than it was trained on.

    Args:
        head_dim: D, features of a head, a multiple of 4.
        width: pixels of a row.
        first: tokens before the first pixel, such as 1 for [CLS]; they have the position of the first pixel.
        wavelengths: pixels in which the fastest and the slowest angle turn once; the others lie between, evenly on a
            logarithmic scale.
    """

    def __init__(
        self, head_dim: int, width: int, *, first: int = 0, wavelengths: tuple[float, float] = _WAVELENGTHS
    ) -> None:
        super().__init__()
        _check_head_dim(head_dim, 4)
        if integer(width, "width", "pixels") < 1 or integer(first, "first", "tokens") < 0:
            raise ValueError(f"width must be at least 1 and first at least 0; got {width} and {first}.")
        two = isinstance(wavelengths, tuple | list) and len(wavelengths) == 2 and all(map(_is_positive, wavelengths))
        if not two or wavelengths[0] > wavelengths[1]:
            raise ValueError(f"wavelengths must be two positive numbers, the shorter one first; got {wavelengths!r}.")
        self.head_dim, self.width, self.first = head_dim, width, first
        self.wavelengths = wavelengths[0], wavelengths[1]

    def extra_repr(self) -> str:
        return f"{self.head_dim}, width={self.width}, first={self.first}"

    def forward(self, positions: Tensor) -> Rotation:
        """The rotation of tokens at `positions`, `[N]` or `[B, N]`."""
        pixel = (_by_batch(positions) - self.first).clamp(min=0)
        rates = plane_rates(self.head_dim, self.wavelengths, device=pixel.device)
        return plane_rotation(pixel // self.width, pixel % self.width, rates)


def line_rates(head_dim: int, base: float = _BASE, *, device: torch.device | None = None) -> Tensor:
    """Radians a token of each angle of a sequence, `[D / 2]`.

    >>> line_rates(4, base=100.0).tolist()
    [1.0, 0.10000000149011612]
    """
    _check_head_dim(head_dim, 2)
    count = head_dim // 2
    return base ** (torch.arange(0, -count, -1, device=device, dtype=torch.float32) / count)


def line_rotation(positions: Tensor, rates: Tensor) -> Rotation:
    """The rotation of tokens at `positions [B, N]`, with the rates of `line_rates`."""
    return _rotation(_angles(positions, rates), rates.dtype)


def plane_rates(
    head_dim: int, wavelengths: tuple[float, float] = _WAVELENGTHS, *, device: torch.device | None = None
) -> Tensor:
    """Radians a pixel of each angle of a row and of a column, `[D / 4]`; the same for images of every size."""
    _check_head_dim(head_dim, 4)
    (fastest, slowest), count = wavelengths, head_dim // 4
    steps = torch.arange(count, device=device, dtype=torch.float32) / max(1, count - 1)
    return 2 * math.pi / (fastest * (slowest / fastest) ** steps)


def plane_rotation(row: Tensor, column: Tensor, rates: Tensor) -> Rotation:
    """The rotation of pixels in rows and columns `[B, N]`, with the rates of `plane_rates`."""
    return _rotation(torch.cat([_angles(row, rates), _angles(column, rates)], dim=-1), rates.dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x `[B, H, N, D]` with features i and i + D / 2 rotated as a pair, at least in fp32, returned in its own dtype.

    >>> rotate(torch.ones(1, 1, 1, 2), Rotary(2)(torch.tensor([0])))
    tensor([[[[1., 1.]]]])
    """
    if not isinstance(rotation, Tensor):
        raise TypeError(f"rotation must be what Rotary or Rotary2D returns; got {type(rotation).__name__}.")
    if x.shape[-1] != 2 * rotation.shape[-1]:
        raise ValueError(
            f"x must have the head dim of the rotation, {2 * rotation.shape[-1]}; got {x.shape[-1]} features."
        )
    products: Tensor = rotation * x.unflatten(-1, (1, 2, -1))
    return products.sum(-2).flatten(-2).to(x.dtype)


def _check_head_dim(head_dim: int, parts: int) -> None:
    if integer(head_dim, "head_dim", "features") < 1 or head_dim % parts:
        raise ValueError(f"head_dim must be a positive multiple of {parts} for rotary positions; got {head_dim}.")


def _is_positive(number: object) -> bool:
    return isinstance(number, SupportsFloat) and not isinstance(number, bool) and 0 < float(number) < math.inf


def _by_batch(positions: Tensor) -> Tensor:
    if not isinstance(positions, Tensor) or positions.ndim not in (1, 2):
        got = list(positions.shape) if isinstance(positions, Tensor) else type(positions).__name__
        raise ValueError(f"positions must be a tensor of shape [N] or [B, N]; got {got}.")
    if dense_tensor(positions, "positions").is_complex() or positions.dtype == torch.bool:
        raise TypeError(f"positions must be real numbers; got {positions.dtype}.")
    return positions[None] if positions.ndim == 1 else positions


def _angles(positions: Tensor, rates: Tensor) -> Tensor:
    """Radians in fp64: in fp32 an angle at position 16,000,000 is off by up to 1."""
    return positions[..., None] * rates.double()


def _rotation(angles: Tensor, dtype: torch.dtype) -> Rotation:
    angles = angles.unsqueeze(1)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    matrices: Tensor = torch.stack([cosine, -sine, sine, cosine], -2).unflatten(-2, (2, 2))
    return matrices

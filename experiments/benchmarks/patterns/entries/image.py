"""Sequences of 2^n tokens as images and videos: sides, and coordinates in several orders."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor


def sides(tokens: int) -> tuple[int, int]:
    """Height and width of an image, as square as powers of two can be.

    >>> sides(1024), sides(128)
    ((32, 32), (8, 16))
    """
    bits = _bits(tokens)
    return 1 << bits // 2, 1 << bits - bits // 2


def volume(tokens: int) -> tuple[int, int, int]:
    """Frames, height and width of a video.

    >>> volume(16_384), volume(128)
    ((16, 32, 32), (4, 4, 8))
    """
    frames = 1 << _bits(tokens) // 3
    return frames, *sides(tokens // frames)


def places(x: Tensor, shape: Sequence[int]) -> list[Tensor]:
    return [x // prod(shape[axis + 1 :]) % side for axis, side in enumerate(shape)]


def places_in_tiles(x: Tensor, shape: Sequence[int], tile: Sequence[int]) -> list[Tensor]:
    size = prod(tile)
    outer = places(x // size, [side // length for side, length in zip(shape, tile)])
    inner = places(x % size, tile)
    return [a * length + b for a, length, b in zip(outer, tile, inner)]


def places_on_curve(x: Tensor, shape: tuple[int, int]) -> list[Tensor]:
    row, column = x * 0, x * 0
    for bit in range(_bits(shape[1])):
        column = column | (x >> 2 * bit & 1) << bit
        row = row | (x >> 2 * bit + 1 & 1) << bit
    return [row, column]


def places_by_residue(x: Tensor, shape: Sequence[int], step: int) -> list[Tensor]:
    smaller = [side // step for side in shape]
    size = prod(smaller)
    residues = places(x // size, [step] * len(shape))
    return [a * step + b for a, b in zip(places(x % size, smaller), residues)]


def _bits(tokens: int) -> int:
    if tokens < 1 or tokens & (tokens - 1):
        raise ValueError(f"tokens must be a power of two to be an image; got {tokens}.")
    return tokens.bit_length() - 1

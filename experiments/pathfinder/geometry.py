"""Directions, and the steps of a snake in them.

Coordinates are (y, x), y downwards; the angle t means the direction (sin t, cos t). A move rounds up to integers, so
after its first dash a snake has only a few dozen directions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SEED_ANGLES = np.arange(-180, 180) * np.pi / 180  # of first dashes


def move(angle: NDArray[np.float64], distance: float) -> NDArray[np.float64]:
    """The step of a distance in each direction, float64 [..., 2]; a position moves by ceil(position + step)."""
    return np.stack([distance * np.sin(angle), distance * np.cos(angle)], axis=-1)


def reverse(angle: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(angle < 0, angle + np.pi, angle - np.pi)


def circle(radius: int) -> NDArray[np.int64]:
    """The possible ends of a dash, relative to the beginning of its gap, by y, then x. int64 [K, 2]

    One pixel of arc apart, rounded down, so slightly off centre, as in the original.
    """
    angles = np.arange(0, 360, 360 / (2 * radius * np.pi)) * np.pi / 180
    return np.unique(np.floor(move(angles, radius)).astype(np.int64), axis=0)


def turning_weight(before: NDArray[np.float64], after: NDArray[np.float64], continuity: float) -> NDArray[np.float64]:
    """1 straight on, 0 from a turn of 90 / continuity degrees."""
    turn = np.abs(after - before)
    turn = np.minimum(turn, 2 * np.pi - turn)
    return np.maximum(np.cos(np.minimum(continuity * turn, np.pi / 2)), 0) ** 2


def disc(radius: int) -> NDArray[np.bool_]:
    y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    return y**2 + x**2 <= radius**2

"""Colours of a cell: blue for full tiles, orange for partial ones, paler with fewer live scores.

Blue and orange are distinct for any colour vision. A cell with both gets a hue in between, weighted by live scores.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FULL = (0x1F, 0x4E, 0x8C)
PARTIAL = (0xE8, 0x73, 0x1A)
DEAD_SCORE = (0xFD, 0xE3, 0xC8)  # dead scores of partial tiles, when single scores are drawn
EMPTY = (0xFF, 0xFF, 0xFF)
GRID = "#c8c8c8"

# The least tint of a live cell: even one live score in a million must be visible.
_LEAST = 0.35


def colours(full: NDArray[np.float64], partial: NDArray[np.float64]) -> NDArray[np.uint8]:
    """RGB uint8 `[..., 3]` of cells with these shares of live scores in full and in partial tiles."""
    live = full + partial
    some = live > 0
    # The square root spreads small shares, which coarse cells of long sequences have.
    tint = np.where(some, _LEAST + (1 - _LEAST) * np.sqrt(live), 0.0)[..., None]
    blue = np.divide(full, live, out=np.zeros_like(live), where=some)[..., None]
    hue = blue * np.array(FULL) + (1 - blue) * np.array(PARTIAL)
    rgb: NDArray[np.uint8] = np.rint((1 - tint) * np.array(EMPTY) + tint * hue).astype(np.uint8)
    return rgb


def hexadecimal(rgb: NDArray[np.uint8] | tuple[int, int, int]) -> str:
    """`#rrggbb`."""
    return "#{:02x}{:02x}{:02x}".format(*(int(channel) for channel in rgb))

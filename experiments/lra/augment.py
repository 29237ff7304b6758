"""Training images turned and mirrored, where their class does not depend on it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]  # the pixels of a square image, row by row

# Which of the eight symmetries of a square each setting draws from; see `turned`.
WAYS = {"none": (0,), "mirror": (0, 4), "square": tuple(range(8))}
_SEED = 3  # begins the seeds of these draws, so that no other draws are the same


def turned(pixels: Image, side: int, way: int) -> Image:
    """An image turned by `way % 4` quarters to the left, then, if `way` is 4 or more, with left and right exchanged.

    >>> turned(np.array([1, 2, 3, 4], np.uint8), 2, 1).tolist(), turned(np.array([1, 2, 3, 4], np.uint8), 2, 4).tolist()
    ([2, 4, 1, 3], [2, 1, 4, 3])
    """
    image = np.rot90(pixels.reshape(side, side), way % 4)
    return (image[:, ::-1] if way >= 4 else image).reshape(-1)


def change_of(setting: str, side: int | None, seed: int, step: int, rank: int) -> Callable[[Image], Image] | None:
    """What happens to every image of a step, one after the other; None: nothing."""
    ways = WAYS[setting]
    if len(ways) == 1 or side is None:
        return None
    random = np.random.default_rng([_SEED, seed, step, rank])
    return lambda pixels: turned(pixels, side, ways[random.integers(len(ways))])

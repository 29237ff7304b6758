from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]

_REACH = 4  # pixels, in each direction
_MOVES = 2 * (2 * _REACH + 1) ** 2
WAYS = {"none": (0,), "mirror": (0, 4), "square": tuple(range(8)), "crops": tuple(range(8, 8 + _MOVES))}
_KEY = (0x7075,)  # independent of others with the same seed


def turned(pixels: Image, side: int, way: int) -> Image:
    """By `way % 4` quarters to the left and, if `way` is 4 to 7, mirrored left to right; from 8 on moved, see `moved`.

    >>> turned(np.array([1, 2, 3, 4], np.uint8), 2, 1).tolist(), turned(np.array([1, 2, 3, 4], np.uint8), 2, 4).tolist()
    ([2, 4, 1, 3], [2, 1, 4, 3])
    """
    if way >= 8:
        return moved(pixels, side, way - 8)
    image = np.rot90(pixels.reshape(side, side), way % 4)
    return (image[:, ::-1] if way >= 4 else image).reshape(-1)


def moved(pixels: Image, side: int, way: int) -> Image:
    """Mirrored if `way` is odd, then down and to the right by -4 to 4 pixels each; what comes in is 0.

    >>> moved(np.array([1, 2, 3, 4], np.uint8), 2, 2 * (9 * 4 + 5)).tolist()
    [0, 1, 0, 3]
    """
    image = pixels.reshape(side, side)
    image = image[:, ::-1] if way % 2 else image
    down, right = divmod(way // 2, 2 * _REACH + 1)
    wide = np.zeros((side + 2 * _REACH, side + 2 * _REACH), np.uint8)
    wide[down : down + side, right : right + side] = image
    return wide[_REACH : _REACH + side, _REACH : _REACH + side].reshape(-1)


@dataclass(frozen=True)
class Turning:
    """Changes images in the same way for any number of processes. batch: images of a step. share: this process's."""

    setting: str
    side: int
    seed: int
    batch: int
    share: slice = field(default_factory=lambda: slice(None))

    def ways(self, step: int) -> NDArray[np.int64]:
        random = np.random.default_rng(np.random.SeedSequence([self.seed, step], spawn_key=_KEY))
        return random.choice(WAYS[self.setting], self.batch)[self.share]

    def __call__(self, step: int, images: Sequence[Image]) -> list[Image]:
        return [turned(image, self.side, way) for image, way in zip(images, self.ways(step).tolist(), strict=True)]

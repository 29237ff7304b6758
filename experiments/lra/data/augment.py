"""Augmentation of training images by symmetries of a square."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]  # row by row

# Of the eight symmetries; see `turned`.
WAYS = {"none": (0,), "mirror": (0, 4), "square": tuple(range(8))}
_KEY = (0x7075,)  # independent of others with the same seed


def turned(pixels: Image, side: int, way: int) -> Image:
    """By `way % 4` quarters to the left and, if `way` is 4 or more, mirrored left to right.

    >>> turned(np.array([1, 2, 3, 4], np.uint8), 2, 1).tolist(), turned(np.array([1, 2, 3, 4], np.uint8), 2, 4).tolist()
    ([2, 4, 1, 3], [2, 1, 4, 3])
    """
    image = np.rot90(pixels.reshape(side, side), way % 4)
    return (image[:, ::-1] if way >= 4 else image).reshape(-1)


@dataclass(frozen=True)
class Turning:
    """In the same way for any number of processes. batch: images of a step. share: this process's."""

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

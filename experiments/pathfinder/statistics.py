from __future__ import annotations

from dataclasses import dataclass
from math import floor, log10, sqrt

import numpy as np
from numpy.typing import NDArray

from experiments.pathfinder.render import render
from experiments.pathfinder.vectors import Vectors

IMAGES_AT_ONCE = 1000


@dataclass(frozen=True)
class Estimate:
    mean: float
    error: float

    def __str__(self) -> str:
        """As many digits as the error supports, and the error.

        >>> str(Estimate(13.7234, 0.031))
        '13.723 ± 0.031'
        """
        digits = max(0, 1 - floor(log10(self.error))) if self.error else 3
        return f"{self.mean:,.{digits}f} ± {self.error:.{digits}f}"


def estimate(values: NDArray[np.generic]) -> Estimate:
    return Estimate(float(values.mean()), float(values.std()) / sqrt(len(values)))


COLUMNS = {
    "attempts": "pairs of target snakes drawn for an accepted one",
    "distractors": "placed",
    "dashes": "of targets and distractors",
    "mean": "of the pixels, 255 being 1",
    "deviation": "standard deviation of an image's pixels",
    "nonzero": "part of the pixels above 0",
    "bright": "part of the pixels above 128",
    "label": "part of the images whose markers are connected",
}


def statistics(vectors: Vectors) -> dict[str, Estimate]:
    pixels: dict[str, list[NDArray[np.float64]]] = {"mean": [], "deviation": [], "nonzero": [], "bright": []}
    for first in range(0, len(vectors), IMAGES_AT_ONCE):
        images = render(vectors, first, first + IMAGES_AT_ONCE)
        for name, values in pixel_statistics(images).items():
            pixels[name].append(values)
    values = {
        "attempts": vectors.attempts,
        "distractors": vectors.distractors,
        "dashes": np.diff(vectors.starts),
        **{name: np.concatenate(parts) for name, parts in pixels.items()},
        "label": vectors.labels,
    }
    return {name: estimate(values[name]) for name in COLUMNS}


def pixel_statistics(images: NDArray[np.uint8]) -> dict[str, NDArray[np.float64]]:
    return {
        "mean": images.mean(axis=(1, 2)) / 255,
        "deviation": images.std(axis=(1, 2)) / 255,
        "nonzero": (images > 0).mean(axis=(1, 2)),
        "bright": (images > 128).mean(axis=(1, 2)),
    }

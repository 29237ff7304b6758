from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.pathfinder.parameters import FOLDS, LABEL
from experiments.pathfinder.released import Sample, find, grey_pixels, is_empty, samples_in, split_rows
from experiments.pathfinder.rendering import drawn_rendering

SPLITS = ("test", "validation", "training", "all")


def folder_of_fold(folder: Path, size: int, contour: int) -> Path:
    if contour not in FOLDS:
        raise ValueError(f"a release has paths of {', '.join(map(str, FOLDS))} dashes; got {contour}")
    return find(f"pathfinder{size}", folder, FOLDS[contour])


def title(place: Path, size: int, split: str) -> str:
    kind = "generated, in the layout of the release" if (place / LABEL).is_file() else "released"
    return f"pathfinder{size}, {place.name}, {kind}, {split} images"


@lru_cache(maxsize=8)
def samples_of(place: Path, split: str) -> tuple[Sample, ...]:
    """Shuffled with seed 42, a tenth each for validation and testing, as in S4 and MEGA."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}; got {split!r}")
    samples = [sample for sample in samples_in(place) if not is_empty(sample)]
    if not samples:
        raise ValueError(f"{place} must hold at least one image that is not empty; its metadata names none")
    if split == "all":
        return tuple(samples)
    try:
        training, validation, test = split_rows(len(samples))
    except ValueError as error:
        raise ValueError(f"{place}: {error}; pass --split all to test on all of them") from None
    rows = {"training": training, "validation": validation, "test": test}[split]
    return tuple(samples[row] for row in rows)


def image_of(sample: Sample, size: int) -> NDArray[np.uint8]:
    return grey_pixels(sample.image, size * size).reshape(size, size)


def rerendered(image: NDArray[np.uint8], random: np.random.Generator) -> NDArray[np.uint8]:
    """Random brightness, noise, faint levels and rounding; lines and markers cannot change apart."""
    rendering = replace(drawn_rendering(random), lines=None)
    return rendering.finish(image / 255, np.zeros(image.shape), random)

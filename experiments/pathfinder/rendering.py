"""Renderings: the ways from a drawing to an 8-bit image.

Implementations of the generator differ in clipping, brightness and rounding. A model trained on one rendering may fail
on another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.pathfinder.parameters import Parameters
from experiments.pathfinder.render import draw_layers, parts
from experiments.pathfinder.stamps import UNIT, markers
from experiments.pathfinder.tables import lines as line_stamps
from experiments.pathfinder.vectors import Vectors

OVERSHOOT, LEVELS, NOISE = ("kept", "clipped"), ("cut", "rounded"), ("everywhere", "drawn pixels")


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """From lines and markers to grey levels; the defaults are this project's rule.

    >>> Rendering(brightness=0.9).finish(np.array([[0.0, 0.8]]), np.array([[1.1, 0.0]]))
    array([[229, 208]], dtype=uint8)

    lines       their maximum value; None: they keep their contrasts, as in the original
    overshoot   "clipped": no line exceeds its contrast and no marker exceeds 1
    brightness  factor; levels above 255 become 255
    noise       standard deviation of normal noise, in levels
    noisy       the pixels with noise
    floor       lower levels become 0
    levels      rounding to integers
    """

    lines: float | None = 1.0
    overshoot: str = "kept"
    brightness: float = 1.0
    noise: float = 0.0
    noisy: str = "everywhere"
    floor: int = 1
    levels: str = "cut"

    def __post_init__(self) -> None:
        for name, allowed in (("overshoot", OVERSHOOT), ("levels", LEVELS), ("noisy", NOISE)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        if (self.lines is not None and not self.lines > 0) or not self.brightness > 0:
            raise ValueError(f"lines and brightness must be more than 0; got {self.lines} and {self.brightness}")
        if not self.noise >= 0 or not 0 <= self.floor <= 255:
            raise ValueError(f"noise must be at least 0, the floor from 0 to 255; got {self.noise} and {self.floor}")

    def finish(
        self, lines: NDArray[np.floating], marks: NDArray[np.floating], random: np.random.Generator | None = None
    ) -> NDArray[np.uint8]:
        factor = 1.0 if self.lines is None else self.lines / lines.max()
        image = np.maximum(lines * factor, marks)
        image *= 255 * self.brightness / image.max()
        if self.noise:
            if random is None:
                raise ValueError("a rendering with noise must have random numbers to draw it from; got none")
            noise = self.noise * random.standard_normal(image.shape, np.float32)
            image += noise if self.noisy == "everywhere" else np.where(image >= 1, noise, 0)
        # A whole number up to its last bits must not become the number below.
        image += 0.5 if self.levels == "rounded" else 1e-6
        levels = image.clip(0, 255).astype(np.uint8)
        levels[levels < self.floor] = 0
        return levels


PROJECT, ORIGINAL = "this project's rule", "the original's own scaling"

RENDERINGS: dict[str, Rendering] = {
    PROJECT: Rendering(),
    ORIGINAL: Rendering(lines=None, levels="rounded"),
    "overshoot clipped": Rendering(overshoot="clipped"),
    "the original's scaling, overshoot clipped": Rendering(lines=None, overshoot="clipped", levels="rounded"),
    "rounded": Rendering(levels="rounded"),
    "the original's scaling, cut": Rendering(lines=None),
    "brightness 0.85": Rendering(brightness=0.85),
    "brightness 0.9": Rendering(brightness=0.9),
    "brightness 1.1": Rendering(brightness=1.1),
    "noise of 5 levels": Rendering(noise=5.0),
    "noise of 10 levels": Rendering(noise=10.0),
    "noise of 5 levels, drawn pixels": Rendering(noise=5.0, noisy="drawn pixels"),
    "noise of 10 levels, drawn pixels": Rendering(noise=10.0, noisy="drawn pixels"),
    "levels below 8 zeroed": Rendering(floor=8),
}


def drawn_rendering(random: np.random.Generator) -> Rendering:
    if random.random() < 1 / 8:
        return Rendering()
    lines = (1.0, None, float(random.uniform(0.7, 1.25)))[random.integers(3)]
    noisy = random.random() < 0.4
    return Rendering(
        lines=lines,
        overshoot=OVERSHOOT[random.integers(2)],
        brightness=float(random.uniform(0.75, 1.2)) if random.random() < 0.6 else 1.0,
        noise=float(random.uniform(0, 12)) if noisy else 0.0,
        noisy=NOISE[random.integers(2)],
        floor=int(random.integers(1, 24)) if random.random() < 0.3 else 1,
        levels=LEVELS[random.integers(2)],
    )


class Layers(NamedTuple):
    lines: NDArray[np.float32]
    marks: NDArray[np.float32]


def layers(vectors: Vectors, index: int, overshoot: str = "kept") -> Layers:
    p = vectors.parameters
    (each,) = parts(vectors, index, index + 1)
    stamps, discs = each.stamps, markers(p.size, p.marker_radius)
    if overshoot == "clipped":
        stamps, discs = clipped_stamps(p, int(vectors.margins[index])), clipped_discs(p)
    lines, marks = np.zeros((2, p.size, p.size), np.int16)
    draw_layers(lines, marks, each.places, each.headings, 2 * p.contour_length, stamps, each.ends, discs)
    return Layers(lines / np.float32(UNIT), marks / np.float32(UNIT))


@lru_cache(maxsize=16)
def clipped_stamps(parameters: Parameters, margin: int) -> NDArray[np.int16]:
    """int16 [2, headings, n, n]"""
    contrasts = np.array([parameters.target_contrast, parameters.distractor_contrast])
    highest = np.rint(UNIT * contrasts).astype(np.int16)
    return np.minimum(line_stamps(parameters, margin), highest[:, None, None, None])


@lru_cache(maxsize=16)
def clipped_discs(parameters: Parameters) -> NDArray[np.int16]:
    return np.minimum(markers(parameters.size, parameters.marker_radius), np.int16(UNIT))


def rendered(
    vectors: Vectors, index: int, rendering: Rendering, random: np.random.Generator | None = None
) -> NDArray[np.uint8]:
    return rendering.finish(*layers(vectors, index, rendering.overshoot), random)

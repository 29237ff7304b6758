"""A second renderer, independent of render.py, which it checks.

The original (drewlinsley/pathfinder, commit ab9c130) draws each dash at twice the resolution in a box around its first
end, halves the box with a Lanczos filter and composes by maximum. Markers are discs drawn at twice the resolution of
the whole image, likewise.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from experiments.pathfinder.rendering import Rendering
from experiments.pathfinder.vectors import Vectors

FINER, LOBES = 2, 3


@lru_cache(maxsize=64)
def lanczos(before: int, after: int) -> NDArray[np.float64]:
    """Resamples a line of pixels to fewer: [after, before], with row sums of 1.

    As wide as the reduction, cut at the border.
    """
    scale = before / after
    centre = (np.arange(after)[:, None] + 0.5) * scale
    distance = (np.arange(before) + 0.5 - centre) / scale
    weights = np.where(np.abs(distance) < LOBES, np.sinc(distance) * np.sinc(distance / LOBES), 0.0)
    return weights / weights.sum(axis=1, keepdims=True)


def halved(drawing: NDArray[np.floating], side: int) -> NDArray[np.float64]:
    along = lanczos(len(drawing), side)
    return along @ drawing @ along.T


@lru_cache(maxsize=4096)
def picture_of_dash(end_y: int, end_x: int, box: int, width: int) -> NDArray[np.float64]:
    """[2 * box + 1, 2 * box + 1]"""
    middle = FINER * box
    drawing = Image.new("L", (2 * middle + 1, 2 * middle + 1), 0)
    ends = [(middle, middle), (middle + end_x, middle + end_y)]
    ImageDraw.Draw(drawing).line(ends, fill=1, width=width)
    return halved(np.asarray(drawing, np.float64), 2 * box + 1)


def directions(vectors: Vectors, index: int) -> NDArray[np.float64]:
    """The drawing angle of each dash: whole degrees for the first of a snake, for others back from the pixel where a
    circle around the gap's beginning ends. float64 [dashes]"""
    margin = int(vectors.margins[index])
    reach = vectors.parameters.dash_length + margin
    around = np.deg2rad(np.arange(0, 360, 360 / (2 * reach * np.pi)))
    points = sorted({(math.floor(reach * math.sin(t)), math.floor(reach * math.cos(t))) for t in around})
    ahead = [math.atan2(y, x) for y, x in points]
    # As in the original: other last bits would round some ends to another pixel.
    back = [angle + math.pi if angle < 0 else angle - math.pi for angle in ahead]
    angles = np.array([math.radians(degree) for degree in range(-180, 180)] + back)
    return angles[vectors.headings[vectors.starts[index] : vectors.starts[index + 1]]]


def plain_layers(vectors: Vectors, index: int, overshoot: str = "kept") -> tuple[NDArray[np.float64], ...]:
    p = vectors.parameters
    box = p.dash_length + math.ceil(p.thickness) + int(vectors.margins[index])
    frame = np.zeros((p.size + 2 * box, p.size + 2 * box))
    places = vectors.places[vectors.starts[index] : vectors.starts[index + 1]].astype(int)
    for number, ((y, x), angle) in enumerate(zip(places.tolist(), directions(vectors, index).tolist())):
        end_y = math.ceil(FINER * box + FINER * p.dash_length * math.sin(angle)) - FINER * box
        end_x = math.ceil(FINER * box + FINER * p.dash_length * math.cos(angle)) - FINER * box
        dash = picture_of_dash(end_y, end_x, box, round(FINER * p.thickness))
        dash = np.minimum(dash, 1.0) if overshoot == "clipped" else dash
        contrast = p.target_contrast if number < 2 * p.contour_length else p.distractor_contrast
        window = frame[y : y + 2 * box + 1, x : x + 2 * box + 1]
        np.maximum(window, contrast * dash, out=window)
    marks = np.zeros((p.size, p.size))
    y, x = np.mgrid[: FINER * p.size, : FINER * p.size]
    for centre_y, centre_x in vectors.markers[index].tolist():
        inside = np.hypot(y - FINER * centre_y, x - FINER * centre_x) <= FINER * p.marker_radius
        disc = halved(inside.astype(np.float64), p.size)
        marks = np.maximum(marks, np.minimum(disc, 1.0) if overshoot == "clipped" else disc)
    return frame[box : box + p.size, box : box + p.size], marks


def plain_render(
    vectors: Vectors, index: int, rendering: Rendering, random: np.random.Generator | None = None
) -> NDArray[np.uint8]:
    """In a rendering, see rendering.py. uint8 [size, size]. random: for the noise."""
    lines, marks = plain_layers(vectors, index, rendering.overshoot)
    brightest = lines.max() if rendering.lines is not None else 1.0
    image = np.maximum(lines / brightest * (rendering.lines or 1.0), marks)
    values = image / image.max() * 255 * rendering.brightness
    if rendering.noise:
        if random is None:
            raise ValueError("a rendering with noise must have random numbers to draw it from; got none")
        noise = random.normal(0.0, rendering.noise, values.shape)
        values = values + noise * ((values >= 1) | (rendering.noisy == "everywhere"))
    whole = np.floor(values + 0.5) if rendering.levels == "rounded" else np.floor(values + 1e-9)
    whole = np.clip(whole, 0, 255)
    return np.where(whole < rendering.floor, 0, whole).astype(np.uint8)

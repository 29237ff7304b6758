"""Renders vectors, in integers: the same bits on every CPU.

Lines are composed by maximum and scaled to 1. Markers, discs of 1, are added by maximum. The whole is scaled to 255,
and truncated, as in the released images.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.pathfinder.compiled import compiled
from experiments.pathfinder.snakes import merge
from experiments.pathfinder.stamps import UNIT, markers
from experiments.pathfinder.tables import lines
from experiments.pathfinder.vectors import Vectors


class Parts(NamedTuple):
    number: int  # among the vectors
    places: NDArray[np.unsignedinteger]  # positions and headings of its dashes
    headings: NDArray[np.uint16]
    stamps: NDArray[np.int16]  # the dashes' pictures, see tables.py
    ends: NDArray[np.int64]  # the centres of its markers


def parts(vectors: Vectors, first: int = 0, last: int | None = None) -> Iterator[Parts]:
    chosen = range(len(vectors))[first:last]
    for index, ends in zip(chosen, vectors.markers[first:last]):
        dashes = slice(vectors.starts[index], vectors.starts[index + 1])
        stamps = lines(vectors.parameters, int(vectors.margins[index]))
        yield Parts(index, vectors.places[dashes], vectors.headings[dashes], stamps, ends)


def blank(vectors: Vectors, first: int, last: int | None) -> NDArray[np.uint8]:
    size = vectors.parameters.size
    return np.empty((len(range(len(vectors))[first:last]), size, size), np.uint8)


def render(vectors: Vectors, first: int = 0, last: int | None = None) -> NDArray[np.uint8]:
    p = vectors.parameters
    images = blank(vectors, first, last)
    discs = markers(p.size, p.marker_radius)
    for image, each in zip(images, parts(vectors, first, last)):
        compose(image, each.places, each.headings, 2 * p.contour_length, each.stamps, each.ends, discs)
    return images


@compiled
def compose(image, places, headings, targets, stamps, centres, discs):
    size = len(image)
    lines, marks = np.zeros((size, size), np.int16), np.zeros((size, size), np.int16)
    draw_layers(lines, marks, places, headings, targets, stamps, centres, discs)
    # v / brightest and m / UNIT
    brightest = greatest(lines)
    canvas = np.empty((size, size), np.int64)
    for y in range(size):
        for x in range(size):
            canvas[y, x] = max(UNIT * np.int64(lines[y, x]), brightest * np.int64(marks[y, x]))
    white = greatest(canvas)
    for y in range(size):
        for x in range(size):
            image[y, x] = 255 * canvas[y, x] // white


@compiled
def draw_layers(lines, marks, places, headings, targets, stamps, centres, discs):
    """Draw dashes and markers, each composed by maximum, into canvases of zeros, int16 [size, size], in units of 1 /
    UNIT."""
    size, width = len(lines), discs.shape[0]
    for dash in range(len(headings)):
        y, x = np.int64(places[dash, 0]), np.int64(places[dash, 1])
        merge(lines, y, x, stamps[0 if dash < targets else 1, headings[dash]])
    for marker in range(2):
        top = window_start(centres[marker, 0], size, width)
        left = window_start(centres[marker, 1], size, width)
        disc = discs[centres[marker, 0] - top, centres[marker, 1] - left]
        for y in range(width):
            for x in range(width):
                marks[top + y, left + x] = max(marks[top + y, left + x], disc[y, x])


@compiled
def greatest(canvas):
    found = np.int64(0)
    for y in range(len(canvas)):
        for x in range(len(canvas)):
            found = max(found, np.int64(canvas[y, x]))
    return found


@compiled
def window_start(centre, size, width):
    return min(max(centre - width // 2, 0), size - width)

"""The curve of each pixel: the ground truth of tracing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from experiments.pathfinder.compiled import compiled
from experiments.pathfinder.render import blank, parts, window_start
from experiments.pathfinder.stamps import markers
from experiments.pathfinder.vectors import Vectors

NOBODY, DISTRACTOR = 0, 3  # the targets are 1 and 2


def owners(vectors: Vectors, first: int = 0, last: int | None = None) -> NDArray[np.uint8]:
    """NOBODY on the background, 1 + s on target snake s, DISTRACTOR on any other. The brightest dash owns a pixel, and
    of equally bright dashes the first. A marker belongs to the snake whose end it marks.
    """
    p = vectors.parameters
    found = blank(vectors, first, last)
    discs = markers(p.size, p.marker_radius)
    for image, each in zip(found, parts(vectors, first, last)):
        marked = int(vectors.marked[each.number])
        snakes = np.array([marked, marked if vectors.labels[each.number] else 1 - marked], np.int64)
        claim(image, each.places, each.headings, p.contour_length, each.stamps, each.ends, discs, snakes)
    return found


def marker_counts(vectors: Vectors, first: int = 0, last: int | None = None) -> NDArray[np.uint8]:
    """The number of markers on the curve through each pixel: 0, 1 or 2. uint8 [n, size, size]

    "Connected" iff a pixel has 2. Distractors have 0.
    """
    found = owners(vectors, first, last)
    labels, marked = vectors.labels[first:last], vectors.marked[first:last]
    of_owner = np.zeros((len(found), DISTRACTOR + 1), np.uint8)
    image = np.arange(len(found))
    of_owner[image, 1 + marked] = 1 + labels
    of_owner[image, 2 - marked] = 1 - labels
    return of_owner[image[:, None, None], found]


@compiled
def claim(image, places, headings, length, stamps, centres, discs, snakes):
    size, width = len(image), discs.shape[0]
    best = np.zeros((size, size), np.int16)
    for y in range(size):
        for x in range(size):
            image[y, x] = 0
    for dash in range(len(headings)):
        snake = min(dash // length, 2)
        stamp = stamps[0 if snake < 2 else 1, headings[dash]]
        top, left = np.int64(places[dash, 0]) - len(stamp) // 2, np.int64(places[dash, 1]) - len(stamp) // 2
        for y in range(max(0, top), min(size, top + len(stamp))):
            for x in range(max(0, left), min(size, left + len(stamp))):
                if stamp[y - top, x - left] > best[y, x]:
                    best[y, x] = stamp[y - top, x - left]
                    image[y, x] = snake + 1
    for marker in range(2):
        top = window_start(centres[marker, 0], size, width)
        left = window_start(centres[marker, 1], size, width)
        disc = discs[centres[marker, 0] - top, centres[marker, 1] - left]
        for y in range(width):
            for x in range(width):
                if disc[y, x] > 0:
                    image[top + y, left + x] = snakes[marker] + 1

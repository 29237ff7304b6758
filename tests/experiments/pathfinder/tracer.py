"""Answers Path-X images by following dashes, without a model or fitting, at 128 pixels, where dashes rarely touch.

A path turns in the middle of a gap: a margin straight on, then a margin in the direction of the next dash.
"""

import numpy as np
from scipy.ndimage import label, uniform_filter

LENGTH, FARTHEST, SHARPEST, BRIGHT = 5, 3.8, np.deg2rad(66), 120


def discs(image):
    around = uniform_filter((image > 150).astype(float), 7, mode="constant")
    found = []
    for _ in range(2):
        y, x = np.unravel_index(around.argmax(), around.shape)
        near = np.argwhere(around > around[y, x] - 0.03)
        near = near[np.abs(near - (y, x)).max(axis=1) <= 4]
        found.append(near.mean(axis=0))
        around[max(0, y - 8) : y + 9, max(0, x - 8) : x + 9] = 0
    return found


def dashes(image, centres):
    """Middle, direction and length of every dash outside the markers; a touching pair counts as none."""
    y, x = np.mgrid[: len(image), : len(image)]
    image = image.astype(float)
    for centre in centres:
        image[np.hypot(y - centre[0], x - centre[1]) < 4.6] = 0
    parts, count = label(image > BRIGHT, np.ones((3, 3)))
    found = []
    for part in range(1, count + 1):
        places = np.argwhere(parts == part)
        weights = image[parts == part]
        if len(places) < 3:
            continue
        middle = (places * weights[:, None]).sum(0) / weights.sum()
        spread = (places - middle).T * weights @ (places - middle) / weights.sum()
        values, vectors = np.linalg.eigh(spread)
        found.append((middle, vectors[:, 1], np.sqrt(12 * values[1])))
    return found


def connected(image, contour=14):
    """Whether a path of `contour` dashes leads from one marker to the other."""
    centres = discs(image)
    found = dashes(image, centres)
    return any(leads(found, centres[0], centres[1], margin, contour) for margin in (2, 3))


def leads(found, start, goal, margin, contour):
    ways = []
    for number, (middle, along, length) in enumerate(found):
        half = min(length, LENGTH + 1) / 2
        for direction in (along, -along):
            ways.append((number, middle - half * direction, middle + half * direction, direction))
    first = LENGTH + 2 * margin  # to the dash after the one under the marker

    def after(end, direction):
        for way in ways:
            turn = np.arccos(np.clip(direction @ way[3], -1, 1))
            error = np.hypot(*(end + margin * direction + margin * way[3] - way[1]))
            if turn < SHARPEST and error < FARTHEST:
                yield way

    def reaches(way, used, left):
        if left == 0:
            pivot = way[2] + margin * way[3]
            last = goal - pivot
            turn = np.arccos(np.clip(way[3] @ last / np.hypot(*last), -1, 1))
            return abs(np.hypot(*last) - LENGTH - margin) < FARTHEST and turn < SHARPEST
        return any(
            reaches(other, used | {other[0]}, left - 1) for other in after(way[2], way[3]) if other[0] not in used
        )

    for way in ways:
        begun = way[1] - start
        turn = np.arccos(np.clip(begun @ way[3] / np.hypot(*begun), -1, 1))
        near = abs(np.hypot(*begun) - first) < FARTHEST and turn < SHARPEST
        if near and reaches(way, frozenset({way[0]}), contour - 3):
            return True
    return False

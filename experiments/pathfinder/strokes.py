"""Other strokes: images of the same question from two further generators.

Only the original's description is shared: curves are drawn in real numbers, not on a grid of stamps, with other dashes,
gaps, widths, caps, bends and markers.

second    round caps, dashes that bend with their curve, smooth bends, dashes and gaps of one length in an image
third     square caps, straight dashes of different lengths and brightness, zigzag; only for testing
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import cos, pi, sin, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.pathfinder.compiled import compiled
from experiments.pathfinder.parameters import MARKER_COUNTS, Parameters, parameters_of
from experiments.pathfinder.rng import below, stream, uniform

ORIGINAL = "original"  # the strokes of draw.py
SAMPLES = 8  # points of a dash
TRIES, SNAKE_TRIES = 16, 6
OWN_TRIES = 4  # tries that follow the style; then a dash turns in any direction that it may
MOST_ATTEMPTS = 1_000_000
_FIELDS = 7  # of a dash: y, x, heading, length, curvature, snake, brightness


@dataclass(frozen=True)
class Style:
    """Ranges that an image or a dash draws from. Lengths are in pixels, or as a factor of the original's."""

    name: str
    dashes: tuple[float, float]  # length, pixels
    gaps: tuple[float, float]  # factor of the original's mean gap at this size
    widths: tuple[float, float]  # factor of the original's thickness
    markers: tuple[float, float]  # factor of the original's radius
    turn: float  # radians, the largest between a dash and the next
    persistence: float  # of a bend: 1 keeps it, 0 draws another, negative values zigzag
    curved: bool  # dashes bend with their curve, and have round caps; otherwise straight, with square caps
    jitter: float  # of the lengths of dashes and gaps inside an image
    faintest: float  # brightness of the faintest dash


STYLES = {
    "second": Style(
        "second", dashes=(4.0, 7.5), gaps=(0.6, 1.3), widths=(0.8, 1.8), markers=(0.8, 1.3), turn=50 * pi / 180,
        persistence=0.6, curved=True, jitter=0.0, faintest=1.0,
    ),
    "third": Style(
        "third", dashes=(3.5, 6.5), gaps=(0.5, 1.1), widths=(0.6, 2.2), markers=(0.8, 1.3), turn=40 * pi / 180,
        persistence=-0.3, curved=False, jitter=0.3, faintest=0.7,
    ),
}  # fmt: skip
TRAINING = (ORIGINAL, "second")
_KINDS = {name: 1 + number for number, name in enumerate(STYLES)}  # keeps their random numbers apart


class Stroked(NamedTuple):
    image: NDArray[np.uint8]
    label: int
    markers: NDArray[np.float64]  # [2, (y, x)]
    counts: NDArray[np.uint8]
    dashes: NDArray[np.float64]  # [d, 7]: y, x, heading, length, curvature, snake (0 and 1: targets), brightness
    width: float
    gap: float


@compiled
def between(rng, low, high):
    return low + (high - low) * uniform(rng)


@compiled
def ahead(y, x, heading, curvature, length):
    if abs(curvature) < 1e-9:
        return y + length * sin(heading), x + length * cos(heading), heading
    last = heading + curvature * length
    return y + (cos(heading) - cos(last)) / curvature, x + (sin(last) - sin(heading)) / curvature, last


@compiled
def sampled(dash, points):
    for number in range(len(points)):
        y, x, _ = ahead(dash[0], dash[1], dash[2], dash[4], dash[3] * number / (len(points) - 1))
        points[number, 0], points[number, 1] = y, x


@compiled
def fits(points, placed, count, own, clearance, longest, size, border):
    least, far, middle = clearance * clearance, (clearance + 2 * longest) ** 2, len(points) // 2
    for point in range(len(points)):
        if not (border <= min(points[point]) and max(points[point]) <= size - 1 - border):
            return False
    for dash in range(count):
        apart_y, apart_x = placed[dash, middle, 0] - points[middle, 0], placed[dash, middle, 1] - points[middle, 1]
        if dash == own or apart_y**2 + apart_x**2 > far:
            continue
        for point in range(len(points)):
            y, x = points[point, 0], points[point, 1]
            for other in range(len(points)):
                if (placed[dash, other, 0] - y) ** 2 + (placed[dash, other, 1] - x) ** 2 < least:
                    return False
    return True


@compiled
def place(rng, snake, number, how, dashes, placed, count, size):
    """snake: y, x, heading and curvature at the end of the last dash, and the number of that dash, -1 before the first.
    how: dash, gap, width, turn, persistence, curved, jitter, faintest
    """
    length, gap, width, turn, persistence, curved, jitter, faintest = how
    bend = turn / (length + gap)
    for attempt in range(TRIES):
        own = int(snake[4])
        dash_length = length * (1 + jitter * (2 * uniform(rng) - 1))
        gap_length = gap * (1 + jitter * (2 * uniform(rng) - 1))
        drawn = bend * (uniform(rng) + uniform(rng) - 1)
        if attempt < OWN_TRIES:
            curvature = min(bend, max(-bend, persistence * snake[3] + drawn))
        else:
            curvature = bend * (2 * uniform(rng) - 1)
        y, x, heading = snake[0], snake[1], snake[2]
        if own >= 0:
            y, x, heading = ahead(y, x, heading, curvature * (1.0 if curved else 1 + length / gap), gap_length)
        dash = dashes[count]
        dash[0], dash[1], dash[2], dash[3] = y, x, heading, dash_length
        dash[4] = curvature if curved else 0.0
        dash[5], dash[6] = number, between(rng, faintest, 1.0)
        sampled(dash, placed[count])
        if fits(placed[count], placed, count, own, width + 3.0, length * (1 + jitter), size, width / 2 + 1):
            snake[0], snake[1], snake[2] = ahead(y, x, heading, dash[4], dash_length)
            snake[3], snake[4] = curvature, count
            return True
    return False


@compiled
def targets(rng, how, length, seed_distance, dashes, placed, size, most):
    """Returns the number of drawn pairs, 0 if all failed."""
    snakes = np.empty((2, 5))
    for attempt in range(1, most + 1):
        y, x = between(rng, 0.25 * size, 0.75 * size), between(rng, 0.25 * size, 0.75 * size)
        towards, distance = between(rng, 0.0, 2 * pi), seed_distance * between(rng, 0.7, 1.3)
        for snake in range(2):
            snakes[snake, 0] = y + snake * distance * sin(towards)
            snakes[snake, 1] = x + snake * distance * cos(towards)
            snakes[snake, 2], snakes[snake, 3], snakes[snake, 4] = between(rng, 0.0, 2 * pi), 0.0, -1.0
        count = 0
        while count < 2 * length and place(rng, snakes[count % 2], count % 2, how, dashes, placed, count, size):
            count += 1
        if count == 2 * length:
            return attempt
    return 0


@compiled
def distractors(rng, how, wanted, length, dashes, placed, count, size):
    snake = np.empty(5)
    for number in range(wanted):
        for _ in range(SNAKE_TRIES):
            snake[0], snake[1] = between(rng, 0.0, size), between(rng, 0.0, size)
            snake[2], snake[3], snake[4] = between(rng, 0.0, 2 * pi), 0.0, -1.0
            added = 0
            while added < length and place(rng, snake, 2 + number, how, dashes, placed, count + added, size):
                added += 1
            if added == length:
                count += length
                break
    return count


@compiled
def to_segment(y, x, first, last):
    along_y, along_x = last[0] - first[0], last[1] - first[1]
    square = along_y * along_y + along_x * along_x
    share = 0.0 if square == 0 else ((y - first[0]) * along_y + (x - first[1]) * along_x) / square
    share = min(1.0, max(0.0, share))
    return sqrt((y - first[0] - share * along_y) ** 2 + (x - first[1] - share * along_x) ** 2)


@compiled
def paint(canvas, owner, dashes, placed, width, curved):
    """Draw the dashes, composed by maximum. owner: int64, the curve of the brightest dash, -1 on the background"""
    size = len(canvas)
    reach = width / 2 + 1.5
    for number in range(len(dashes)):
        points, dash = placed[number], dashes[number]
        top, left = int(max(0, points[:, 0].min() - reach)), int(max(0, points[:, 1].min() - reach))
        bottom, right = int(min(size, points[:, 0].max() + reach + 2)), int(min(size, points[:, 1].max() + reach + 2))
        for y in range(top, bottom):
            for x in range(left, right):
                if curved:
                    distance = 1e9
                    for point in range(len(points) - 1):
                        distance = min(distance, to_segment(y, x, points[point], points[point + 1]))
                    outside = distance - width / 2
                else:
                    along = (y - dash[0]) * sin(dash[2]) + (x - dash[1]) * cos(dash[2])
                    across = (x - dash[1]) * sin(dash[2]) - (y - dash[0]) * cos(dash[2])
                    outside = max(abs(along - dash[3] / 2) - dash[3] / 2, abs(across) - width / 2)
                value = dash[6] * min(1.0, max(0.0, 0.5 - outside))
                if value > canvas[y, x]:
                    canvas[y, x], owner[y, x] = value, dash[5]


@compiled
def paint_disc(canvas, owner, centre, radius, snake):
    for y in range(len(canvas)):
        for x in range(len(canvas)):
            value = min(1.0, max(0.0, 0.5 + radius - sqrt((y - centre[0]) ** 2 + (x - centre[1]) ** 2)))
            if value > 0:
                owner[y, x] = snake
                canvas[y, x] = max(canvas[y, x], value)


@lru_cache(maxsize=64)
def original(size: int, contour: int) -> Parameters:
    return parameters_of(size, contour)


def stroked(style: str, size: int, contour: int, seed: int, index: int) -> Stroked:
    """Image `index` of a seed, independent of all else.

    >>> stroked("second", 64, 6, seed=0, index=0).image.shape
    (64, 64)
    """
    if style not in STYLES:
        raise ValueError(f"the strokes must be one of {ORIGINAL}, {', '.join(STYLES)}; got {style!r}")
    s, p = STYLES[style], original(size, contour)
    rng = stream(seed, _KINDS[style] << 48 | size << 32 | contour, index)
    label, marked = below(rng, 2), below(rng, 2)
    length, gap, width, radius = (
        between(rng, low * scale, high * scale)
        for (low, high), scale in (
            (s.dashes, p.dash_length / 5), (s.gaps, 2 * sum(p.margins) / len(p.margins)), (s.widths, p.thickness),
            (s.markers, p.marker_radius),
        )
    )  # fmt: skip
    how = (length, gap, width, s.turn, s.persistence, s.curved, s.jitter, s.faintest)
    most = 2 * contour + p.distractors * p.distractor_length
    dashes, placed = np.zeros((most, _FIELDS)), np.zeros((most, SAMPLES, 2))
    if not targets(rng, how, contour, float(p.seed_distance), dashes, placed, size, MOST_ATTEMPTS):
        raise ValueError(f"no pair of curves fits into image {index} of {style} in {MOST_ATTEMPTS:,} attempts")
    count = distractors(rng, how, p.distractors, p.distractor_length, dashes, placed, 2 * contour, size)
    canvas, owner = np.zeros((size, size)), np.full((size, size), -1, np.int64)
    paint(canvas, owner, dashes[:count], placed[:count], width, s.curved)
    last = marked if label else 1 - marked
    ends = np.stack([placed[marked, 0], placed[2 * contour - 2 + last, -1]])
    for snake, end in zip((marked, last), ends, strict=True):
        paint_disc(canvas, owner, end, radius, snake)
    of_snake = np.zeros(2 + p.distractors, np.uint8)
    of_snake[marked], of_snake[1 - marked] = 1 + label, 1 - label
    counts = np.where(owner < 0, 0, of_snake[owner]).astype(np.uint8)
    assert counts.max() < MARKER_COUNTS
    image = np.rint(255 * canvas).astype(np.uint8)
    return Stroked(image, label, ends, counts, dashes[:count], width, gap)

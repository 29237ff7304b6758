from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.pathfinder.parameters import Parameters
from experiments.pathfinder.rng import below, stream
from experiments.pathfinder.snakes import draw_distractors, draw_targets
from experiments.pathfinder.tables import tables

MOST_ATTEMPTS = 10_000_000  # the arena's hardest images need 6,000 on average


class Drawing(NamedTuple):
    label: int
    marked: int
    margin: int
    attempts: int
    dashes: NDArray[np.int64]


def draw(parameters: Parameters, seed: int, index: int) -> Drawing:
    p = parameters
    rng = image_stream(parameters, seed, index)
    label = below(rng, 2)
    margin = p.margins[below(rng, len(p.margins))]
    t = tables(p, margin)
    mask, near = np.empty((2, p.size, p.size), np.int16)
    targets = np.empty((2 * p.contour_length, 3), np.int64)
    attempts = draw_targets(rng, p.padding, p.seed_distance, p.contour_length, t, MOST_ATTEMPTS, mask, near, targets)
    if not attempts:
        raise ValueError(f"no pair of target snakes fits into image {index} in {MOST_ATTEMPTS:,} attempts with {p}")
    distractors = np.empty((p.distractors * p.distractor_length, 3), np.int64)
    placed = draw_distractors(rng, p.distractors, p.distractor_length, t, mask, near, distractors)
    dashes = np.concatenate([targets, distractors[: placed * p.distractor_length]])
    return Drawing(label, below(rng, 2), margin, attempts, dashes)


def image_stream(parameters: Parameters, seed: int, index: int) -> NDArray[np.uint64]:
    """Different for every size and contour length, so that equal seeds share no labels."""
    return stream(seed, parameters.size << 32 | parameters.contour_length, index)

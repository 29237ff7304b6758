from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.pathfinder.shortcuts import pairs, shortcuts
from experiments.pathfinder.vectors import Vectors

IMAGES_FOR_RULES = 10_000


def marker_distances(vectors: Vectors) -> NDArray[np.float64]:
    between = np.diff(vectors.markers.astype(np.float64), axis=1)[:, 0]
    return np.hypot(between[:, 0], between[:, 1])


def by_distance(vectors: Vectors, right: NDArray[np.bool_]) -> dict[str, Any]:
    """Accuracies by quarters of the distance, near to far: the model's on the images that `right` [n] scores, and those
    of the rules of experiments.pathfinder.shortcuts.

    The quarters are over all four pairs of ends of an image, so rules and model have the same borders.
    """
    found = shortcuts(pairs(vectors)[:IMAGES_FOR_RULES])
    borders = np.array(found[0].distances)
    quarter = np.searchsorted(borders, marker_distances(vectors)[: len(right)])
    counts = np.bincount(quarter, minlength=4)
    sums = np.bincount(quarter, weights=right, minlength=4)
    return {
        "borders_px": borders.tolist(),
        "images": counts.tolist(),
        "accuracy": [float(total / count) if count else None for total, count in zip(sums, counts)],
        "rules": [
            {
                "rule": rule.rule,
                "accuracy": rule.accuracy,
                "error": rule.error,
                "images": rule.images,
                "by_distance": list(rule.by_distance),
            }
            for rule in found
        ],
    }

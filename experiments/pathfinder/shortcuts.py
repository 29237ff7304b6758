"""Accuracies without tracing a path, from the two markers and the dashes below them.

A snake of a given length ends at a typical distance from its beginning, and its end dashes point towards each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from experiments.pathfinder.geometry import circle
from experiments.pathfinder.tables import drawn_angles
from experiments.pathfinder.vectors import Vectors

FOLDS = 5
PAIRS = 4


@dataclass(frozen=True)
class Shortcut:
    """The accuracy of a fitted rule on other images.

    error: the standard error; the four pairs of an image are not independent. by_distance: by quarters of the marker
    distance, near to far, with the borders in pixels.
    """

    rule: str
    images: int
    accuracy: float
    error: float
    by_distance: tuple[float, ...]
    distances: tuple[float, ...]


@dataclass(frozen=True)
class Pairs:
    """All pairs of a first and a last end of n images.

    features  float64 [n, 4, f]  distance first
    labels    uint8   [n, 4]     1 for the same snake
    """

    features: NDArray[np.float64]
    labels: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, images: slice) -> Pairs:
        return Pairs(self.features[images], self.labels[images])


def pairs(vectors: Vectors) -> Pairs:
    """The marked ends are drawn independently of the snakes, so every image is an example of all four pairs.

    Features: the distance in pixels, then the directions of the two end dashes as cosine and sine of the angle from the
    line to the other marker. The first sine is made non-negative: mirrored images are equivalent.
    """
    tips = vectors.tips.astype(np.float64)
    directions = tip_directions(vectors)
    features, labels = [], []
    for snake in (0, 1):
        for other in (0, 1):
            ends = np.stack([tips[:, snake, 0], tips[:, other, 1]], axis=1)
            angles = np.stack([directions[:, snake, 0], directions[:, other, 1]], axis=1)
            features.append(describe(ends, angles))
            labels.append(np.full(len(vectors), snake == other, np.uint8))
    return Pairs(np.stack(features, axis=1), np.stack(labels, axis=1))


def tip_directions(vectors: Vectors) -> NDArray[np.float64]:
    p = vectors.parameters
    angles = np.zeros((256, max(360 + len(circle(p.dash_length + margin)) for margin in p.margins)))
    for margin in p.margins:
        known = drawn_angles(circle(p.dash_length + margin))
        angles[margin, : len(known)] = known
    headings = vectors.headings[vectors.targets[:, :, [0, -1]]]
    return angles[vectors.margins[:, None, None], headings]


def describe(ends: NDArray[np.float64], angles: NDArray[np.float64]) -> NDArray[np.float64]:
    dy, dx = (ends[:, 1] - ends[:, 0]).T
    towards = np.arctan2(dy, dx)
    first, second = angles[:, 0] - towards, angles[:, 1] - towards - np.pi
    mirror = np.where(np.sin(first) < 0, -1, 1)
    return np.stack(
        [np.hypot(dy, dx), np.cos(first), mirror * np.sin(first), np.cos(second), mirror * np.sin(second)], axis=1
    )


RULES = {"marker distance": 1, "distance and end dashes": 5}  # features


def shortcuts(examples: Pairs, seed: int = 0) -> list[Shortcut]:
    return [evaluate(rule, examples.features[:, :, :count], examples.labels, seed) for rule, count in RULES.items()]


def evaluate(rule: str, features: NDArray[np.float64], labels: NDArray[np.uint8], seed: int) -> Shortcut:
    right = (cross_validated(features, labels, seed) > 0.5) == labels
    distance = features[:, :, 0]
    borders = np.quantile(distance, (0.25, 0.5, 0.75))
    quarter = np.searchsorted(borders, distance)
    return Shortcut(
        rule,
        len(labels),
        float(right.mean()),
        float(right.mean(axis=1).std()) / sqrt(len(labels)),
        tuple(float(right[quarter == number].mean()) for number in range(4)),
        tuple(float(border) for border in borders),
    )


def cross_validated(features: NDArray[np.float64], labels: NDArray[np.uint8], seed: int) -> NDArray[np.float64]:
    from sklearn.ensemble import HistGradientBoostingClassifier

    n = len(labels)
    if n < 2 * FOLDS:
        raise ValueError(f"a shortcut needs at least {2 * FOLDS} images to be fitted and tested; got {n}")
    fold = np.random.default_rng(seed).permutation(n) % FOLDS
    chances = np.empty(labels.shape)
    for held_out in range(FOLDS):
        test, train = fold == held_out, fold != held_out
        model = HistGradientBoostingClassifier(
            max_iter=100,
            learning_rate=0.08,
            max_leaf_nodes=8,
            min_samples_leaf=20,
            early_stopping=False,
            random_state=0,
        )
        model.fit(features[train].reshape(-1, features.shape[2]), labels[train].ravel())
        chances[test] = model.predict_proba(features[test].reshape(-1, features.shape[2]))[:, 1].reshape(-1, PAIRS)
    return chances

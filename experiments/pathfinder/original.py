"""What the original generator gives: drewlinsley/pathfinder, commit ab9c130, with the Long Range Arena's parameters.

Its image filter, scipy.misc.imresize, no longer exists. In its place stands a Lanczos filter in floating point, whose
images are closer to the released ones than those of the integer one (see README.md).

STATISTICS  by size and contour length: images, then the columns of statistics.py, from a plain transcription of the
            original run on one core
SHORTCUTS   by size and contour length: images, then the accuracy by marker distance, and by distance and end dashes;
            gradient boosting, five folds by image; measured earlier and apart from this package
"""

from __future__ import annotations

from experiments.pathfinder.statistics import Estimate

STATISTICS: dict[tuple[int, int], tuple[int, dict[str, Estimate]]] = {}

SHORTCUTS: dict[tuple[int, int], tuple[int, float, float]] = {
    (32, 6): (2215, 0.584, 0.778),
    (32, 14): (283, 0.50, 0.615),
    (128, 6): (5548, 0.734, 0.928),
    (128, 9): (1442, 0.60, 0.845),
    (128, 14): (466, 0.525, 0.848),
    (256, 9): (2177, 0.776, 0.919),
    (256, 14): (1314, 0.62, 0.822),
}

"""Results of the original generator: drewlinsley/pathfinder, commit ab9c130, with the Long Range Arena's parameters.

A Lanczos filter in floating point replaces its image filter scipy.misc.imresize, which no longer exists. Lines are
scaled and levels truncated as in the released images (see render.py).

STATISTICS  by size and contour length: the images counted, the images rendered (the first of them), then some columns
            of statistics.py, from a plain transcription of the original
SHORTCUTS   by size and contour length: images, then the accuracy by marker distance, and by distance and end dashes;
            gradient boosting, five folds by image; measured independently of this package
"""

from __future__ import annotations

from experiments.pathfinder.statistics import Estimate

COLUMNS = ("attempts", "distractors", "mean", "deviation", "nonzero", "bright")


def columns(counted: int, rendered: int, *values: tuple[float, float]) -> tuple[int, int, dict[str, Estimate]]:
    return counted, rendered, {name: Estimate(*value) for name, value in zip(COLUMNS, values, strict=True)}


STATISTICS: dict[tuple[int, int], tuple[int, int, dict[str, Estimate]]] = {
    (32, 6): columns(1057, 1000, (11.04, 0.32), (5.484, 0.047),
        (0.05439, 0.00020), (0.16763, 0.00030), (0.2763, 0.0011), (0.05014, 0.00024)),
    (32, 9): columns(1254, 1000, (38.5, 1.1), (4.472, 0.041),
        (0.07000, 0.00028), (0.18392, 0.00034), (0.3489, 0.0014), (0.06304, 0.00033)),
    (32, 14): columns(640, 300, (239.4, 9.4), (2.688, 0.048),
        (0.08153, 0.00054), (0.19296, 0.00062), (0.4042, 0.0027), (0.07054, 0.00072)),
    (64, 6): columns(1326, 1000, (11.20, 0.30), (8.170, 0.038),
        (0.03962, 0.00010), (0.14313, 0.00018), (0.17100, 0.00049), (0.03653, 0.00013)),
    (64, 9): columns(444, 300, (186.3, 9.6), (6.973, 0.073),
        (0.05184, 0.00031), (0.15953, 0.00043), (0.2254, 0.0014), (0.04718, 0.00034)),
    (64, 14): columns(92, 30, (4353, 421), (4.79, 0.16),
        (0.0614, 0.0013), (0.1700, 0.0017), (0.2704, 0.0057), (0.0544, 0.0016)),
    (128, 6): columns(500, 500, (1.820, 0.063), (16.9920, 0.0040),
        (0.020785, 0.000023), (0.109703, 0.000082), (0.086825, 0.000059), (0.022073, 0.000031)),
    (128, 9): columns(903, 500, (11.61, 0.51), (16.522, 0.024),
        (0.029362, 0.000052), (0.12816, 0.00013), (0.12552, 0.00017), (0.031141, 0.000061)),
    (128, 14): columns(138, 81, (334, 39), (14.04, 0.18),
        (0.03562, 0.00041), (0.13951, 0.00077), (0.1537, 0.0016), (0.03759, 0.00042)),
    (256, 6): columns(926, 300, (1.570, 0.031), (15.0, 0.0),
        (0.0073520, 0.0000057), (0.070049, 0.000032), (0.024317, 0.000017), (0.0076874, 0.0000088)),
    (256, 9): columns(305, 300, (2.50, 0.11), (14.9967, 0.0033),
        (0.0100206, 0.0000076), (0.080369, 0.000036), (0.034951, 0.000023), (0.010480, 0.000012)),
    (256, 14): columns(458, 300, (8.28, 0.36), (14.871, 0.017),
        (0.013182, 0.000015), (0.091004, 0.000054), (0.047535, 0.000052), (0.013802, 0.000019)),
}  # fmt: skip

SHORTCUTS: dict[tuple[int, int], tuple[int, float, float]] = {
    (32, 6): (2215, 0.584, 0.778),
    (32, 14): (283, 0.50, 0.615),
    (128, 6): (5548, 0.734, 0.928),
    (128, 9): (1442, 0.60, 0.845),
    (128, 14): (466, 0.525, 0.848),
    (256, 9): (2177, 0.776, 0.919),
    (256, 14): (1314, 0.62, 0.822),
}

"""What the original generator gives: drewlinsley/pathfinder, commit ab9c130, with the Long Range Arena's parameters.

Its image filter, scipy.misc.imresize, no longer exists; in its place stands a Lanczos filter in floating point. Lines
are scaled and levels cut as in the released images (see render.py).

STATISTICS  by size and contour length: images, then the columns of statistics.py, from a plain transcription of the
            original run on one core
SHORTCUTS   by size and contour length: images, then the accuracy by marker distance, and by distance and end dashes;
            gradient boosting, five folds by image; measured earlier and apart from this package
"""

from __future__ import annotations

from experiments.pathfinder.statistics import Estimate

COLUMNS = ("attempts", "distractors", "mean", "deviation", "nonzero", "bright")


def columns(images: int, *values: tuple[float, float]) -> tuple[int, dict[str, Estimate]]:
    """values: mean and standard error of each of COLUMNS."""
    return images, {name: Estimate(*value) for name, value in zip(COLUMNS, values, strict=True)}


STATISTICS: dict[tuple[int, int], tuple[int, dict[str, Estimate]]] = {
    (32, 6): columns(
        1057,
        (11.04, 0.32),
        (5.484, 0.047),
        (0.05854, 0.00022),
        (0.17760, 0.00031),
        (0.2865, 0.0011),
        (0.05661, 0.00023),
    ),
    (32, 9): columns(
        1254, (38.5, 1.1), (4.472, 0.041), (0.07639, 0.00029), (0.19763, 0.00035), (0.3638, 0.0013), (0.07596, 0.00031)
    ),
    (32, 14): columns(
        640, (239.4, 9.4), (2.688, 0.048), (0.08897, 0.00045), (0.20676, 0.00051), (0.4238, 0.0019), (0.08987, 0.00051)
    ),
    (64, 6): columns(
        1326,
        (11.20, 0.30),
        (8.170, 0.038),
        (0.035630, 0.000081),
        (0.12983, 0.00013),
        (0.19491, 0.00050),
        (0.027708, 0.000086),
    ),
    (64, 9): columns(
        444, (186.3, 9.6), (6.973, 0.073), (0.04618, 0.00023), (0.14317, 0.00030), (0.2540, 0.0013), (0.03506, 0.00020)
    ),
    (64, 14): columns(
        92, (4353, 421), (4.79, 0.16), (0.05436, 0.00068), (0.15202, 0.00080), (0.3009, 0.0038), (0.04093, 0.00063)
    ),
    (128, 6): columns(
        378,
        (1.833, 0.072),
        (16.9921, 0.0046),
        (0.022673, 0.000029),
        (0.11820, 0.00010),
        (0.10536, 0.00011),
        (0.023852, 0.000044),
    ),
    (128, 9): columns(
        903,
        (11.61, 0.51),
        (16.522, 0.024),
        (0.032186, 0.000042),
        (0.13886, 0.00010),
        (0.15181, 0.00015),
        (0.033826, 0.000054),
    ),
    (128, 14): columns(
        138, (334, 39), (14.04, 0.18), (0.03945, 0.00034), (0.15208, 0.00065), (0.1863, 0.0014), (0.04134, 0.00036)
    ),
    (256, 6): columns(
        926,
        (1.570, 0.031),
        (15.0, 0.0),
        (0.0078611, 0.0000037),
        (0.073782, 0.000024),
        (0.028933, 0.000013),
        (0.0082307, 0.0000059),
    ),
    (256, 9): columns(
        305,
        (2.50, 0.11),
        (14.9967, 0.0033),
        (0.0108791, 0.0000086),
        (0.086016, 0.000045),
        (0.041720, 0.000032),
        (0.011315, 0.000013),
    ),
    (256, 14): columns(
        458,
        (8.28, 0.36),
        (14.871, 0.017),
        (0.014450, 0.000014),
        (0.098453, 0.000053),
        (0.056784, 0.000051),
        (0.014965, 0.000017),
    ),
}

SHORTCUTS: dict[tuple[int, int], tuple[int, float, float]] = {
    (32, 6): (2215, 0.584, 0.778),
    (32, 14): (283, 0.50, 0.615),
    (128, 6): (5548, 0.734, 0.928),
    (128, 9): (1442, 0.60, 0.845),
    (128, 14): (466, 0.525, 0.848),
    (256, 9): (2177, 0.776, 0.919),
    (256, 14): (1314, 0.62, 0.822),
}

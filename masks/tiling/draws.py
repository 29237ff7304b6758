"""Random choices that are the same on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparseflash.masks.tiling.arguments import at_least

Integers = np.ndarray[Any, np.dtype[np.int64]]


def generator(seed: Any) -> np.random.Generator:
    """PCG64, of which the patterns use integer draws and shuffles only: no rounding, so no machine differs."""
    return np.random.Generator(np.random.PCG64(at_least(0, seed, "seed", "")))


def subsets(draw: np.random.Generator, sizes: Integers, count: int) -> tuple[Integers, Integers]:
    """For each row r `min(count, sizes[r])` distinct numbers below `sizes[r]`: `(rows, picks)`, any subset as likely.

    Floyd's algorithm on all rows at once: time goes with what is drawn, not with what there is to draw from.
    """
    count = min(count, int(sizes.max(initial=0)))
    picks = np.full((len(sizes), count), -1, dtype=np.int64)
    for step in range(count):
        # The last `count` numbers of each row take turns; those of short rows that do not exist are left out.
        newest = sizes - count + step
        pick = draw.integers(0, np.maximum(newest, 0), endpoint=True)
        pick = np.where((picks[:, :step] == pick[:, None]).any(1), newest, pick)
        picks[:, step] = np.where(newest >= 0, pick, -1)
    rows, steps = np.nonzero(picks >= 0)
    return rows, picks[rows, steps]

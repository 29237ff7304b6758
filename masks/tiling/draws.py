"""Random choices that are the same on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparseflash.blockmask.arguments import integer

Integers = np.ndarray[Any, np.dtype[np.int64]]


def generator(seed: Any) -> np.random.Generator:
    """PCG64. The patterns use only integer draws and shuffles of it: without rounding, all machines agree."""
    seed = integer(seed, "seed", "")
    if seed < 0:
        raise ValueError(f"seed must be at least 0; got {seed}.")
    return np.random.Generator(np.random.PCG64(seed))


def subsets(draw: np.random.Generator, sizes: Integers, count: int) -> tuple[Integers, Integers]:
    """`(rows, picks)`: for each row r, `min(count, sizes[r])` distinct numbers below `sizes[r]`, all subsets equally
    likely.

    Floyd's algorithm on all rows at once: time is proportional to the numbers that are drawn, not to `sizes`.
    """
    count = min(count, int(sizes.max(initial=0)))
    picks = np.full((len(sizes), count), -1, dtype=np.int64)
    for step in range(count):
        newest = sizes - count + step
        pick = draw.integers(0, np.maximum(newest, 0), endpoint=True)
        pick = np.where((picks[:, :step] == pick[:, None]).any(1), newest, pick)
        picks[:, step] = np.where(newest >= 0, pick, -1)
    rows, steps = np.nonzero(picks >= 0)
    return rows, picks[rows, steps]

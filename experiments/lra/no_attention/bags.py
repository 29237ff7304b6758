"""Bags: how often each token, or each short run of tokens, is in an example, without their order."""

from __future__ import annotations

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from experiments.lra.data.examples import Examples

COLUMNS = 2**18  # of runs of tokens, whose hashes share them
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def features(examples: Examples, longest: int, run: int) -> scipy.sparse.csr_matrix:
    """A row for each example: the logarithms of the counts of all runs of 1 to `run` tokens, scaled to length 1.

    Two towers, x and y, become [x * y, |x - y|].
    """
    towers = [bags(examples, longest, run, tower) for tower in range(examples.towers)]
    if len(towers) == 1:
        return towers[0]
    first, second = towers
    return scipy.sparse.hstack([first.multiply(second), abs(first - second)], format="csr")


def bags(examples: Examples, longest: int, run: int, tower: int = 0) -> scipy.sparse.csr_matrix:
    columns = 256 if run == 1 else COLUMNS
    indices, counts, starts = [], [], [0]
    for row in range(len(examples)):
        found = np.bincount(keys(examples.sequence(row, tower)[:longest], run, columns))
        live = np.flatnonzero(found)
        values = np.log1p(found[live]).astype(np.float32)
        indices.append(live.astype(np.int32))
        counts.append(values / np.linalg.norm(values))
        starts.append(starts[-1] + len(live))
    shape = len(examples), columns
    return scipy.sparse.csr_matrix((np.concatenate(counts), np.concatenate(indices), np.array(starts)), shape)


def keys(symbols: NDArray[np.uint8], run: int, columns: int) -> NDArray[np.int64]:
    """The columns of all runs of 1 to `run` symbols.

    >>> keys(np.array([3, 5, 3], np.uint8), 1, 256).tolist()
    [3, 5, 3]
    """
    if run == 1:
        return symbols.astype(np.int64)
    found, hashed = [], np.zeros(len(symbols), np.uint64)
    for length in range(1, run + 1):
        if len(symbols) < length:
            break
        hashed = (hashed[: len(symbols) - length + 1] + symbols[length - 1 :] + np.uint64(1)) * _FACTOR
        found.append(hashed >> np.uint64(64 - columns.bit_length() + 1))
    return np.concatenate(found).astype(np.int64)

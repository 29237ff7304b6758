"""The value of every operator's expression, for whole arrays of tokens at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from experiments.lra.data.listops.grammar import CLOSE, MAX, MED, MIN, SM

NO_CLASS = 255  # of digits and closing brackets, as in ../batches.py


def operator_values(tokens: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """At each operator the value of its expression, elsewhere `NO_CLASS`, for whole expressions one after the other.

    >>> operator_values(np.array([MAX, 3, SM, 9, 4, CLOSE, 1, CLOSE], np.uint8)).tolist()
    [3, 255, 3, 255, 255, 255, 255, 255]
    """
    opens, closes = (tokens >= MIN) & (tokens < CLOSE), tokens == CLOSE
    level = np.cumsum(opens, dtype=np.int32) - np.cumsum(closes, dtype=np.int32) - opens
    values = np.where(tokens < MIN, tokens, NO_CLASS)
    for outer in range(int(level.max(initial=0)) - 1, -1, -1):
        operators = np.flatnonzero(opens & (level == outer))
        arguments = np.flatnonzero(~closes & (level == outer + 1))
        if len(operators):
            values[operators] = applied(tokens[operators], values[arguments], np.searchsorted(arguments, operators))
    return np.where(opens, values, NO_CLASS).astype(np.uint8)


def applied(operators: NDArray[np.uint8], arguments: NDArray[np.uint8], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    counts = np.diff(starts, append=len(arguments))
    numbers = arguments.astype(np.int64)
    ordered = numbers[np.lexsort((numbers, np.repeat(np.arange(len(operators)), counts)))]
    low, high = ordered[starts + (counts - 1) // 2], ordered[starts + counts // 2]
    chosen = {
        MIN: ordered[starts],
        MAX: ordered[starts + counts - 1],
        MED: (low + high) // 2,
        SM: np.add.reduceat(numbers, starts) % 10,
    }
    return np.select([operators == operator for operator in chosen], list(chosen.values()))

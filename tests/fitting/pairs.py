"""Covering arrays: few cases in which every two values of two different factors occur together."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any


def pairwise(
    factors: Mapping[str, Sequence[Any]], *, seed: int = 0, possible: Callable[[Mapping[str, Any]], bool] | None = None
) -> list[dict[str, Any]]:
    """Cases that cover every possible pair of values of two factors; the same for the same seed.

    >>> cases = pairwise({"a": [0, 1, 2], "b": "xy", "c": [True, False]})
    >>> len(cases), {(case["a"], case["b"]) for case in cases} == {(a, b) for a in range(3) for b in "xy"}
    (6, True)

    Greedy: every factor takes the value that covers most new pairs.
    """
    drawn, names = random.Random(seed), list(factors)
    left = dict.fromkeys(
        (a, x, b, y)
        for a, b in combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
        if possible is None or possible({a: x, b: y})
    )
    cases = []
    while left:
        a, x, b, y = drawn.choice(list(left))
        case = {a: x, b: y}
        for name in drawn.sample(names, len(names)):
            if name in case:
                continue
            values = [v for v in factors[name] if possible is None or possible({**case, name: v})]
            if not values:
                raise ValueError(f"possible must leave {name} a value beside every case; got none beside {case}")
            gains = [sum(pair in left for pair in _pairs_with(name, value, case, names)) for value in values]
            case[name] = drawn.choice([v for v, gain in zip(values, gains) if gain == max(gains)])
        for name in names:
            for pair in _pairs_with(name, case[name], case, names):
                left.pop(pair, None)
        cases.append({name: case[name] for name in names})
    return cases


def _pairs_with(name: str, value: Any, case: Mapping[str, Any], names: Sequence[str]) -> list[tuple[Any, ...]]:
    at = names.index(name)
    return [
        (other, case[other], name, value) if names.index(other) < at else (name, value, other, case[other])
        for other in case
        if other != name
    ]

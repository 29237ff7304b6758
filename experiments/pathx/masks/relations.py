"""Relations between pixels: which pixels see each other in a layer.

The score of pixels (y, x) and (y', x') is live, with dy = |y - y'| and dx = |x - x'|:

    dense           always
    near:R          dy <= R and dx <= R                      a window, masks.neighborhood
    rows:R          dy <= R                                  a band of 2 R + 1 rows; columns:R likewise
    axial:R         dy <= R or dx <= R                       R = 0: masks.axial
    butterfly:C     y // C ~ y' // C and x // C ~ x' // C    masks.butterfly_2d, a ~ b: equal, or differ in one bit
    factor:C:S      the same with a ~ b: equal, or differ only in bit S: one factor of the butterfly
    mine.py:rule    rule(y, x, y', x'), any function on integer tensors; package.module:rule, too
    tiles:R         blocks of tokens whose boxes come within R pixels see each other whole: near:R, rounded up

All but the last depend only on pixels, so dropping the background equals masking it. `tiles:R` depends on how tokens
fill blocks, never on other images, and has no partial tiles. A rule from a file computes all tiles: it shows a
mask's accuracy, not its speed.

"@rows" puts the layer's tokens in row-major order (also "@columns", "@hilbert").

Register tokens see and are seen by all tokens of their image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from experiments.pathx.masks.orders import BASE, ORDERS

OWN = "own"
KINDS = {"dense": 0, "near": 1, "rows": 1, "columns": 1, "axial": 1, "butterfly": 1, "factor": 2, "tiles": 1}

MOST_LAYERS = 1000

Numbers = TypeVar("Numbers", Tensor, NDArray[np.int64])


@dataclass(frozen=True)
class Relation:
    kind: str
    numbers: tuple[int, ...] = ()
    along: str | None = None  # not the default order
    function: str = ""  # place and name of a user's rule

    @property
    def name(self) -> str:
        name = self.function or ":".join([self.kind, *map(str, self.numbers)])
        return name if self.along is None else f"{name}@{self.along}"

    @property
    def order(self) -> str:
        if self.along is not None:
            return self.along
        return self.kind if self.kind in ("rows", "columns") else BASE

    def live(self, y: Numbers, x: Numbers, other_y: Numbers, other_x: Numbers) -> Numbers:
        numbers = self.numbers
        if self.kind == OWN:
            return own(self.function)(*(each.long() for each in (y, x, other_y, other_x)))
        if self.kind in ("dense", "tiles"):
            return (y == y) & (other_y == other_y)
        if self.kind == "near":
            return ((y - other_y).abs() <= numbers[0]) & ((x - other_x).abs() <= numbers[0])
        if self.kind == "rows":
            return (y - other_y).abs() <= numbers[0]
        if self.kind == "columns":
            return (x - other_x).abs() <= numbers[0]
        if self.kind == "axial":
            return ((y - other_y).abs() <= numbers[0]) | ((x - other_x).abs() <= numbers[0])
        cell = numbers[0]
        return self.related(y // cell, other_y // cell) & self.related(x // cell, other_x // cell)

    def related(self, a: Numbers, b: Numbers) -> Numbers:
        differing = a ^ b
        if self.kind == "butterfly":
            return (differing & (differing - 1)) == 0
        return (differing == 0) | (differing == self.numbers[1])


def parse(text: str) -> Relation:
    relation, at, along = text.strip().partition("@")
    if at and along not in ORDERS:
        raise ValueError(f"the order of a layer's tokens must be one of {', '.join(ORDERS)}; got {text!r}")
    kind, *words = relation.split(":")
    if kind not in KINDS and len(words) == 1 and words[0].isidentifier():
        own(relation)
        return Relation(OWN, along=along or None, function=relation)
    if kind not in KINDS or len(words) != KINDS[kind] or not all(word.isdecimal() for word in words):
        known = ", ".join(":".join([kind, *"RS"[:count]]) for kind, count in KINDS.items())
        raise ValueError(
            f"a layer's mask must be one of {known} with whole numbers of pixels, or a rule as "
            f"file.py:rule; got {text!r}"
        )
    numbers = tuple(map(int, words))
    if kind in ("butterfly", "factor") and numbers[0] < 1:
        raise ValueError(f"the cells of a butterfly must have at least 1 pixel; got {text!r}")
    if kind == "factor" and (numbers[1] < 1 or numbers[1] & (numbers[1] - 1)):
        raise ValueError(f"the stride of a factor must be a power of two, in cells; got {text!r}")
    return Relation(kind, numbers, along or None)


@cache
def own(text: str) -> Callable[..., Any]:
    from sparseflash.cli.expression import needed
    from sparseflash.cli.pattern_text import function_of

    place, _, name = text.rpartition(":")
    function = function_of(place, name)
    if len(needed(function)) != 4:
        raise ValueError(
            f"{text} must be a rule of (y, x, other_y, other_x); got one of ({', '.join(needed(function))})"
        )
    return function


def parse_layers(text: str) -> tuple[Relation, ...]:
    """First layer first; "*n" repeats a relation.

    >>> [each.name for each in parse_layers("near:16*2,dense")]
    ['near:16', 'near:16', 'dense']
    """
    layers: list[Relation] = []
    for word in text.split(","):
        name, star, count = word.partition("*")
        if star and not (count.strip().isdecimal() and int(count) > 0):
            raise ValueError(f"layers must be masks with commas between them, near:16*4,dense say; got {text!r}")
        times = int(count) if star else 1
        if len(layers) + times > MOST_LAYERS:
            raise ValueError(f"a model must have at most {MOST_LAYERS} layers; got {text[:60]!r}")
        layers += [parse(name)] * times
    return tuple(layers)

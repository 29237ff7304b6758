"""Drawn cases that cover every pair of the factors that decide how much shared memory a portable kernel needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from experiments.benchmarks.compile.changes import change
from sparseflash import BlockMask, masks, scores
from sparseflash.backends.triton.overrides import NEVER_SPLIT, always_split
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.scores.change import Scores
from tests.fitting.pairs import pairwise

HEADS = 2
CHANGES = ("none", "few", "any")  # the number of score modifications

FACTORS: dict[str, Sequence[Any]] = {
    "arch": (80, 86, 89, 90, 100),
    "arithmetic": ("float16", "bfloat16", "tf32", "float32"),
    "dims": (*((d, d) for d in (16, 32, 64, 80, 128, 256)), (64, 128), (128, 64), (256, 64), (32, 256)),
    "block": (16, 32, 64, 128, 256),
    "tiling": ("own", "united", "gathered"),
    "tokens": (128, 1000, 1024),
    "lengths": (False, True),
    "dropout": ("", "places", "positions"),
    "descriptors": (True, False),
    "split": (False, True),
    "learned": (False, True),
    "pairs": ("", "bias half", "bias fp32", "tile_bias half", "tile_bias fp32"),
    "function": ("", "scores", "places", "tables", "pairs", "two pairs", "causal"),
    "table": ("", "t5", "grid"),
    "key_bias": (False, True),
    "distance": ("", "alibi", "log"),
    "softcap": (False, True),
    "sink": (False, True),
}  # fmt: skip
PLAIN = {"pairs": "", "function": "", "table": "", "key_bias": False, "distance": "", "softcap": False, "sink": False}


@dataclass(frozen=True)
class Case:
    arch: int
    arithmetic: str
    dims: tuple[int, int]
    block: int
    tiling: str
    tokens: int
    lengths: bool
    dropout: str
    descriptors: bool
    split: bool
    learned: bool
    pairs: str
    function: str
    table: str
    key_bias: bool
    distance: str
    softcap: bool
    sink: bool

    def __str__(self) -> str:
        """What differs from plain attention that uses the mask's own tiles.

        >>> print(Case(90, "float16", (128, 128), 128, **OWN_TILES, **PLAIN | {"pairs": "bias fp32", "sink": True}))
        90 float16 128 block=128 bias fp32 sink
        """
        dims = f"{self.dims[0]}" if self.dims[0] == self.dims[1] else "x".join(map(str, self.dims))
        rest = {name: x for name, x in asdict(self).items() if name not in ("arch", "arithmetic", "dims", "block")}
        defaults = {**OWN_TILES, **PLAIN}
        words = [
            name if x is True else f"no {name}" if x is False else f"{name}={x}" if name not in _CLEAR else str(x)
            for name, x in rest.items()
            if x != defaults[name]
        ]
        return " ".join([f"{self.arch} {self.arithmetic} {dims} block={self.block}", *words])

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.arithmetic in ("tf32", "float32") else getattr(torch, self.arithmetic)

    def overrides(self) -> dict[str, Any]:
        return {
            "descriptors": self.descriptors, "splits": always_split(1) if self.split else NEVER_SPLIT,
            "tiling": {"own": _own, "united": _united, "gathered": _gathered}[self.tiling],
        }  # fmt: skip

    def mask(self) -> BlockMask:
        return masks.causal(self.tokens, block=self.block)

    def changes(self, mask: BlockMask) -> Scores | None:
        made = Scores(())
        for each in self._changes(mask):
            made = made + each
        return made if made.changes else None

    def _changes(self, mask: BlockMask) -> Iterator[Any]:
        pairs, _, width = self.pairs.partition(" ")
        table = "table" if self.table == "t5" else self.table
        added = (self.distance, table, "key_bias" if self.key_bias else "", pairs)
        for kind in ("softcap" if self.softcap else "", *added):
            if kind:
                yield change(kind, mask, HEADS, torch.float32 if width == "fp32" else self.dtype)
        if self.function:
            function, shapes = _FUNCTIONS[self.function]
            n = self.tokens
            given = [torch.zeros(shape(n), dtype=torch.int64 if name == "kinds" else None) for name, shape in shapes]
            yield scores.function(function, *given)
        if self.sink:
            yield change("sink", mask, HEADS)


OWN_TILES: dict[str, Any] = {
    "tiling": "own", "tokens": 1024, "lengths": False, "dropout": "", "descriptors": True, "split": False,
    "learned": False,
}  # fmt: skip
_CLEAR = ("tiling", "pairs", "distance")  # factors whose values are clear without the factor's name


def is_possible(case: Mapping[str, Any]) -> bool:
    if case.get("tiling", "own") != "own":
        most = 32 if case["tiling"] == "gathered" else 64
        # `tile_bias` is read in the mask's own tiles.
        return case.get("block", 16) <= most and "tile_bias" not in case.get("pairs", "")
    return True


def covering(changes: Literal["none", "few", "any"], seed: int = 0) -> list[Case]:
    """Cases that cover every pair of factor values, with no score modifications, at most two, or any number."""

    def possible(case: Mapping[str, Any]) -> bool:
        return is_possible(case) and (changes == "any" or sum(bool(case.get(name)) for name in PLAIN) <= 2)

    factors = {**FACTORS, **({name: (x,) for name, x in PLAIN.items()} if changes == "none" else {})}
    return [Case(**each) for each in pairwise(factors, seed=seed, possible=possible)]


def _own(tilings: Sequence[Tiling]) -> Tiling:
    return tilings[0]


def _united(tilings: Sequence[Tiling]) -> Tiling:
    return max(tiling for tiling in tilings if not tiling.gathered)


def _gathered(tilings: Sequence[Tiling]) -> Tiling:
    return max((tiling for tiling in tilings if tiling.gathered), default=tilings[0])


def _of_scores(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 3 * torch.tanh(score / 3) - 0.1 * (q - k).abs() + torch.where(k > q, 0.5 * score, -score.square() / 8)


def _of_places(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, gain: Tensor, shift: Tensor, slope: Tensor
) -> Tensor:
    return torch.where(q % 3 == 1, score * gain[h], score) + shift[q] * score.sigmoid() + slope[h, k]


def _of_tables(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, table: Tensor, pairs: Tensor, kinds: Tensor
) -> Tensor:
    return score + table[h, (k - q).clamp(-3, 3) + 3] * score.sin() + pairs[0, k, q] + table[h // 2, kinds[k]]


def _of_pairs(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, pairs: Tensor) -> Tensor:
    return score + pairs[q, k]


def _of_two_pairs(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, gains: Tensor, shifts: Tensor, more: Tensor
) -> Tensor:
    return score * gains[h, q, k] + shifts[q, k] + more[k, q]


def _causal(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(k <= q, score, -1e4)


_FUNCTIONS: dict[str, tuple[Any, tuple[tuple[str, Any], ...]]] = {
    "scores": (_of_scores, ()),
    "places": (_of_places, (("gain", lambda n: (HEADS,)), ("shift", lambda n: (n,)), ("slope", lambda n: (HEADS, n)))),
    "tables": (
        _of_tables,
        (("table", lambda n: (HEADS, 7)), ("pairs", lambda n: (1, n, n)), ("kinds", lambda n: (n,))),
    ),
    "pairs": (_of_pairs, (("pairs", lambda n: (n, n)),)),
    "two pairs": (
        _of_two_pairs,
        (("gains", lambda n: (HEADS, n, n)), ("shifts", lambda n: (n, n)), ("more", lambda n: (n, n))),
    ),
    "causal": (_causal, ()),
}

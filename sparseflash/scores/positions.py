"""Score modifications of tokens that lie elsewhere than their positions: in packed sequences, or on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.blockmask.cache import BoundedDict, once
from sparseflash.blockmask.compiling import contents_when_faking
from sparseflash.scores.distance import Distance
from sparseflash.scores.function import Function

# Functions of places in a call that call functions of positions, kept so that each is recorded once and not at every
# step.
_placed = BoundedDict(32)


class Packed:
    """Sequences one behind the other, by the running sums of their queries and keys.

    >>> sequences = Packed((0, 2, 3), (0, 2, 6))
    >>> sequences.shifts(torch.device("cpu")).tolist(), sequences.is_even
    ([0, 0, 3], False)
    """

    def __init__(self, q_sums: tuple[int, ...], k_sums: tuple[int, ...]) -> None:
        self.q_sums, self.k_sums = q_sums, k_sums
        sizes = list(zip(pairwise(q_sums), pairwise(k_sums), strict=True))
        # (queries, keys, shift) of each sequence with scores, whose last query is at the position of its last key.
        self._live = [
            (q_stop - q_start, k_stop - k_start, k_stop - q_stop)
            for (q_start, q_stop), (k_start, k_stop) in sizes
            if q_stop > q_start and k_stop > k_start
        ]

    @property
    def is_even(self) -> bool:
        """Whether packed tokens have the distances that they have within their sequences."""
        return all(shift == self.k_sums[-1] - self.q_sums[-1] for *_, shift in self._live)

    @property
    def offsets(self) -> tuple[int, int]:
        """The lowest and the highest offset of a key from a query of its sequence."""
        queries, keys = (max((each[side] for each in self._live), default=1) for side in (0, 1))
        return 1 - keys, queries - 1

    @cached_property
    def first(self) -> int:
        """The lowest position of a query among the packed keys, or 0 if all are higher."""
        lengths = (stop - start for start, stop in pairwise(self.q_sums))
        return min(0, *(k_stop - length for length, k_stop in zip(lengths, self.k_sums[1:], strict=True)))

    def shifts(self, device: torch.device) -> Tensor:
        """What to add to the index of each packed query to get its position among the packed keys: int64 `[n]`."""
        return self._spread([k - q for q, k in zip(self.q_sums[1:], self.k_sums[1:], strict=True)], device)

    def places(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Four tensors, int64: each query's and each key's index in its sequence, each query's sequence, and what to
        add to its index for its position."""
        queries, keys = (
            torch.arange(sums[-1], device=device)
            - _spread(list(sums[:-1]), [stop - start for start, stop in pairwise(sums)], device)
            for sums in (self.q_sums, self.k_sums)
        )
        numbers = self._spread(list(range(len(self.q_sums) - 1)), device)
        longer = [
            (k_stop - k_start) - (q_stop - q_start)
            for (q_start, q_stop), (k_start, k_stop) in zip(pairwise(self.q_sums), pairwise(self.k_sums), strict=True)
        ]
        return queries, keys, numbers, self._spread(longer, device)

    def _spread(self, values: list[int], device: torch.device) -> Tensor:
        return _spread(values, [stop - start for start, stop in pairwise(self.q_sums)], device)


def _spread(values: list[int], counts: list[int], device: torch.device) -> Tensor:
    """Each value as often as its count says, int64."""
    given, repeats = (torch.tensor(x, dtype=torch.int64, device=device) for x in (values, counts))
    return given.repeat_interleave(repeats, output_size=sum(counts))


_places = BoundedDict(16)


def places_of(sequences: Packed, device: torch.device) -> tuple[Tensor, ...]:
    """`Packed.places`, made once for all layers."""

    def make() -> tuple[Tensor, ...]:
        with contents_when_faking():
            made = sequences.places(torch.device("cpu"))
        return tuple(x.to(device) for x in made)

    return once(_places, (sequences.q_sums, sequences.k_sums, device), make)


def with_positions(
    distance: Distance | None, function: Function | None, shift: int, positions: tuple[Tensor, ...]
) -> Function:
    """A distance, or a function, or both, as a function of places in a call.

    positions: of its queries and keys, int64; with packed sequences also each query's sequence, which becomes the
    function's b, and what to add to its position for its distance, besides `shift`.
    """
    is_packed = len(positions) > 2
    key = is_packed, shift, distance and distance.is_log, function and function.identity
    made = _placed.get(key) or _placed.put(key, _of_places(distance, function, shift, is_packed))
    slopes = [] if distance is None else [distance.slopes]
    changed: Function = made.with_tensors((*positions, *slopes, *(() if function is None else function.given)))
    return changed


def _of_places(distance: Distance | None, function: Function | None, shift: int, is_packed: bool) -> Function:
    def locate(b: Tensor, h: Tensor, q: Tensor, k: Tensor, given: list[Tensor]) -> Located:
        query, key = given.pop(0)[q], given.pop(0)[k]
        if not is_packed:
            return Located(b, h, query, key, shift, (h,))
        return Located(given.pop(0)[q], h, query, key, shift + given.pop(0)[q], (h,))

    return of_located(locate, function, None if distance is None else distance.is_log)


class Located(NamedTuple):
    """Where a score is: the arguments of a function, of a distance and of a table."""

    batch: Tensor
    head: Tensor
    query: Tensor
    key: Tensor
    shift: int | Tensor  # from the position of the query to its position among the keys
    of_head: tuple[Tensor, ...]  # the indices of the head's slope and table


def of_located(
    locate: Callable[[Tensor, Tensor, Tensor, Tensor, list[Tensor]], Located], function: Function | None,
    is_log: int | None, *, has_table: bool = False,
) -> Function:  # fmt: skip
    """A distance, a table and a function, those that are given, of the positions that `locate` finds for b, h, q and k.

    Its tensors are taken from the front of a list: the slopes, the four of a table, and the function's. is_log: of the
    distance; None without one.
    """

    def placed(change: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
        def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *tensors: Tensor) -> Tensor:
            given = list(tensors)
            at = locate(b, h, q, k, given)
            if is_log is not None:
                far = (at.query + at.shift - at.key).abs().to(score.dtype)
                score = score - given.pop(0)[at.of_head].to(score.dtype) * (far.log1p() if is_log else far)
            if has_table:
                table, buckets, q_codes, k_codes = (given.pop(0) for _ in range(4))
                score = score + table[(*at.of_head, buckets[q_codes[at.query] - k_codes[at.key]])]
            return score if change is None else change(score, at.batch, at.head, at.query, at.key, *given)

        return changed

    if function is None:
        return Function(placed(None), ())
    # Not `function` itself, whose tensors would stay in memory with the new one.
    derivative = None if function.derivative is None else placed(function.derivative)
    return Function(placed(function.function), (), derivative)

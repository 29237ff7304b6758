"""Patterns as lists of tiles on the CPU, which can have millions: compared and joined without another long list."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseflash.limits import check_count

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask

FEW_NUMBERS = 512  # up to this many numbers, a dict beats array operations
TILES_AT_ONCE = 1 << 16  # tiles of a list handled at a time: temporaries of a list of millions stay in a CPU's caches

Integers = NDArray[np.int64]
Numbers = NDArray[np.int32]


class Pattern(NamedTuple):
    """The tiles of one pattern, and a table that renames its kinds."""

    counts: Integers  # of each block row
    indices: Numbers
    tile: Numbers
    table: Numbers | None = None

    def kinds(self, start: int, stop: int) -> Numbers:
        tile = self.tile[start:stop]
        return tile if self.table is None else self.table.take(tile)


def patterns_of(
    indptr: Integers, indices: Numbers, tile: Numbers, row_blocks: int, table: Numbers | None = None
) -> list[Pattern]:
    """The patterns of lists whose rows are those of one pattern after the other."""
    counts, ends = np.diff(indptr).reshape(-1, row_blocks), indptr[::row_blocks].tolist()
    return [Pattern(some, indices[a:b], tile[a:b], table) for some, (a, b) in zip(counts, pairwise(ends), strict=True)]


def patterns_of_mask(mask: BlockMask, table: Numbers | None = None) -> list[Pattern]:
    """The patterns of a mask on any device, also of a dynamic one."""
    indptr, indices, tile = (x.cpu().numpy() for x in (mask.indptr, mask.indices, mask.tile))
    return patterns_of(indptr, indices, tile, mask.blocks[0], table)


def distinct_patterns(patterns: Sequence[Pattern]) -> tuple[list[int], list[int]]:
    """`(keep, number)`: the first pattern of each distinct kind, and the index in `keep` of every pattern's kind."""
    if len(patterns) == 1:
        return [0], [0]
    known: dict[tuple[bytes, ...], list[int]] = {}  # by what they begin with: most patterns that differ do so early
    keep: list[int] = []
    number: list[int] = []
    for pattern in patterns:
        begin = pattern.indices[:TILES_AT_ONCE], pattern.kinds(0, TILES_AT_ONCE)
        alike = known.setdefault((pattern.counts.tobytes(), *(x.tobytes() for x in begin)), [])
        found = next((n for n in alike if _go_on_alike(patterns[keep[n]], pattern)), len(keep))
        if found == len(keep):
            alike.append(found)
            keep.append(len(number))
        number.append(found)
    return keep, number


def _go_on_alike(a: Pattern, b: Pattern) -> bool:
    """Whether two patterns of equal counts have equal tiles after the first `TILES_AT_ONCE`."""
    for start in range(TILES_AT_ONCE, len(a.tile), TILES_AT_ONCE):
        stop = start + TILES_AT_ONCE
        if not np.array_equal(a.kinds(start, stop), b.kinds(start, stop)):
            return False
        if not np.array_equal(a.indices[start:stop], b.indices[start:stop]):
            return False
    return True


def kinds_by_appearance(kind: Numbers, count: int) -> Integers:
    """The kinds, among 0 .. count - 1, that occur, by first appearance."""
    if len(kind) <= FEW_NUMBERS:
        return np.array(list(dict.fromkeys(kind.tolist())), dtype=np.int64)
    first = first_of_each(kind, count)
    found = np.flatnonzero(first < len(kind))
    return found[first[found].argsort()]


def first_of_each(kind: Numbers, count: int) -> Integers:
    """The place of the first tile of each kind 0 .. count - 1; `len(kind)` for a kind that does not occur."""
    first = np.full(count, len(kind), dtype=np.int64)
    unseen = np.ones(count, dtype=np.bool_)
    for start in range(0, len(kind), TILES_AT_ONCE):
        some = kind[start : start + TILES_AT_ONCE]
        new = np.flatnonzero(unseen.take(some))[::-1]
        if len(new):
            first[some[new]] = new + start  # the last write wins: the first appearance
            unseen[some[new]] = False
    return first


def joined(patterns: Sequence[Pattern]) -> tuple[Integers, Numbers, Numbers]:
    """New lists `(indptr, indices, tile)` of patterns, one behind the other."""
    indptr = starts_of(np.concatenate([each.counts for each in patterns]))
    tile = np.empty(indptr[-1], dtype=np.int32)
    end = 0
    for each in patterns:
        for start in range(0, len(each.tile), TILES_AT_ONCE):
            some = each.kinds(start, start + TILES_AT_ONCE)
            tile[end : end + len(some)] = some
            end += len(some)
    return indptr, np.concatenate([each.indices for each in patterns]), tile


def starts_of(counts: Integers) -> Integers:
    """`indptr` from the number of tiles in each row: where each row begins, and where the last one ends."""
    made = np.zeros(len(counts) + 1, dtype=np.int64)
    counts.cumsum(out=made[1:])
    check_count("tiles of a mask", int(made[-1]), remedy="Use larger blocks.")
    return made

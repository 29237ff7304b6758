"""Lists of tiles: a range of columns for each block row, and graphs of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import flag
from sparseflash.blockmask.patterns import TILES_AT_ONCE, Numbers, starts_of
from sparseflash.blockmask.unique import distinct
from sparseflash.masks.tiling.draws import Integers

if TYPE_CHECKING:
    from scipy import sparse


_LONG = 256  # from this length on, copying a range beats looking up its numbers


def between(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """`(rows, cols)` of the tiles `first[i] <= j <= last[i]` of every block row i, sorted; none where last < first.

    `first`, `last`: int64 `[Mq]`, block columns.

    >>> rows, cols = between(torch.tensor([0, 2, 5]), torch.tensor([1, 2, 4]))
    >>> rows.tolist(), cols.tolist()
    ([0, 0, 1], [0, 1, 2])
    """
    rows, cols = columns_between(first.numpy(), last.numpy())
    return torch.from_numpy(rows), torch.from_numpy(cols)


def columns_between(first: Integers, last: Integers) -> tuple[Integers, Integers]:
    """`between` for arrays."""
    counts = np.maximum(last - first + 1, 0)
    rows = np.repeat(np.arange(len(first)), counts)
    cols = np.arange(len(rows))
    cols -= np.repeat(counts.cumsum() - counts - first, counts)
    return rows, cols


def ranges(first: Integers, last: Integers) -> Iterator[tuple[slice, slice, Numbers]]:
    """The integers from `first[r]` to `last[r]` of all r, one behind the other, int32, in portions that fit in a CPU's
    caches: `(the r of a portion, the places of its integers among all, the integers)`.

    >>> [(rows, places, some.tolist()) for rows, places, some in ranges(np.array([5, 0]), np.array([6, 0]))]
    [(slice(0, 2, None), slice(0, 3, None), [5, 6, 0])]
    """
    counts = np.maximum(last - first + 1, 0)
    stops = counts.cumsum()
    shift = (first - (stops - counts)).astype(np.int32)
    row = place = 0
    while row < len(counts):
        until = max(row + 1, int(stops.searchsorted(place + TILES_AT_ONCE, side="right")))
        stop = int(stops[until - 1])
        some = np.arange(place, stop, dtype=np.int32)
        some += shift[row:until].repeat(counts[row:until])
        yield slice(row, until), slice(place, stop), some
        row, place = until, stop


def take_ranges(table: Numbers, first: Integers, last: Integers, out: Numbers) -> None:
    """Writes `table[first[r] : last[r] + 1]` of every range r to `out`, one after the other.

    >>> out = np.zeros(3, dtype=np.int32)
    >>> take_ranges(np.array([7, 8, 9], dtype=np.int32), np.array([1, 0]), np.array([2, 0]), out)
    >>> out.tolist()
    [8, 9, 7]
    """
    if len(out) < _LONG * len(first):
        for _, places, at in ranges(first, last):
            table.take(at, out=out[places], mode="clip")  # without this mode, NumPy would make a copy
        return
    place = 0
    for start, stop in zip(first.tolist(), (last + 1).tolist(), strict=True):
        if start < stop:
            out[place : place + stop - start] = table[start:stop]
            place += stop - start


def cut_columns(
    first: Integers, last: Integers, first_full: Integers, last_full: Integers
) -> tuple[Integers, Integers]:
    """`(rows, cols)` of the tiles `first[i] <= j <= last[i]` but the full ones, `first_full[i] <= j <= last_full[i]`.

    There can be millions of tiles, most of them full; only the others need to be examined.
    """
    some_full = first_full <= last_full
    before = np.where(some_full, np.minimum(first_full - 1, last), last)
    behind = np.where(some_full, np.maximum(last_full + 1, first), last + 1)
    parts = columns_between(first, before), columns_between(behind, last)
    rows, cols = (np.concatenate(column) for column in zip(*parts, strict=True))
    return rows, cols


def rows_of(first: Integers, last: Integers) -> tuple[Integers, Numbers]:
    """`(indptr, cols)` of the tiles `first[i] <= j <= last[i]` of every block row i."""
    indptr = starts_of(np.maximum(last - first + 1, 0))
    cols = np.empty(indptr[-1], dtype=np.int32)
    if len(cols) >= _LONG * len(first):
        take_ranges(np.arange(last.max() + 1, dtype=np.int32), first, last, cols)
        return indptr, cols
    for _, places, some in ranges(first, last):
        cols[places] = some
    return indptr, cols


def incidence(labels: Tensor, count: int) -> sparse.csr_array:
    """The labels of each block: a sparse bool `[M, count]` matrix of `labels`, int `[M, n]`.

    The entries of `incidence(of_queries) @ incidence(of_keys).T` are the blocks of queries and of keys that have a
    label in common, found in time proportional to their number.

    >>> labels = torch.tensor([[0, 3], [3, 4], [1, 1]])
    >>> entries(incidence(labels, 5) @ incidence(labels, 5).T)
    (tensor([0, 0, 1, 1, 2]), tensor([0, 1, 0, 1, 2]))
    """
    from scipy import sparse  # imported late, because the import is slow and few patterns need it

    block = torch.arange(len(labels), device="cpu").repeat_interleave(labels.shape[1])
    there = torch.ones(labels.numel(), dtype=torch.bool, device="cpu")
    ids = block.numpy(), labels.reshape(-1).numpy()
    return sparse.coo_array((there.numpy(), ids), (len(labels), count)).tocsr()


def sharing(of_queries: sparse.csr_array, of_keys: sparse.csr_array) -> tuple[Tensor, Tensor]:
    """`(rows, cols)`, int32, of the blocks of queries and of keys that have a label in common, sorted.

    >>> first, second = (incidence(torch.tensor(labels), 4) for labels in ([[0, 1], [2, 3]], [[0, 1], [3, 3]]))
    >>> sharing(first, second)
    (tensor([0, 1], dtype=torch.int32), tensor([0, 1], dtype=torch.int32))

    `of_queries`, `of_keys`: from `incidence`. Labels of the same blocks count once: a block of pixels has all of its
    columns in common with the blocks below it, and each would be found again and again.
    """
    from scipy import sparse

    blocks = sparse.vstack([of_queries, of_keys], format="csc")
    blocks.sum_duplicates()
    label = np.flatnonzero(np.diff(blocks.indptr))
    starts, counts = blocks.indptr[label], np.diff(blocks.indptr)[label]
    _, first, number = np.unique(_digests(blocks.indices, starts, counts), return_index=True, return_inverse=True)
    # A label is left out only if the first one with its digest has exactly its blocks: digests may agree by chance.
    other = first[number]
    alike = np.repeat(counts[other] == counts, counts)
    entry = np.arange(len(blocks.indices)) + np.repeat(starts[other] - starts, counts)
    differs = ~alike
    differs[alike] = blocks.indices[entry[alike]] != blocks.indices[alike]
    kept = label[(other == np.arange(len(label))) | np.logical_or.reduceat(differs, starts)]
    found = (of_keys[:, kept] @ of_queries[:, kept].T).tocsc()  # sorts the keys of each block of queries
    rows = np.arange(of_queries.shape[0], dtype=np.int32).repeat(np.diff(found.indptr))
    return torch.from_numpy(rows), torch.from_numpy(found.indices.astype(np.int32, copy=False))


def _digests(blocks: Integers, starts: Integers, counts: Integers) -> Any:
    """A number for each run of `blocks`, equal for equal runs and seldom for others."""
    mixed = (blocks.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.add.reduceat(mixed, starts) + counts.astype(np.uint64)


def entries(matrix: sparse.csr_array) -> tuple[Tensor, Tensor]:
    """`(rows, cols)` of the entries of a sparse matrix, sorted."""
    matrix.sort_indices()
    found = matrix.tocoo()
    return torch.from_numpy(found.row).long(), torch.from_numpy(found.col).long()


def of_blocks(
    layouts: Sequence[tuple[Tensor | Integers, Tensor | Integers]], q_len: int, *, causal: bool, block: int
) -> BlockMask:
    """The mask of graphs of blocks, one for each head: tile (i, j) is full for every edge (i, j).

    `layouts`: `(rows, cols)` for each head, int64 `[E]`, edges in any order and possibly repeated. `causal` drops those
    with j > i, and cuts the diagonal tiles to `k <= q`.
    """
    count, causal = -(-q_len // block), flag(causal, "causal")
    triangle = bitmask.pack(torch.ones(1, block, block, dtype=torch.bool, device="cpu").tril())
    parts = []
    for rows, cols in layouts:
        edge = distinct(torch.as_tensor(rows, device="cpu") * count + torch.as_tensor(cols, device="cpu"))[0]
        i, j = edge // count, edge % count
        if causal:
            i, j = i[j <= i], j[j <= i]
        parts.append((i, j, (i == j).long() if causal else torch.zeros_like(i), triangle))
    return BlockMask._of(q_len, q_len, block, block, parts)

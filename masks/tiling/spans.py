"""Spans: masks where each query sees one run of keys, marked queries see all keys, and all queries see marked keys.

Tiles are listed, never scanned; bits are made a word at a time, for the tiles that the end of a run cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import Block, block_pair, token_counts
from sparseflash.blockmask.build import arrays_of_rows
from sparseflash.blockmask.patterns import Numbers, starts_of
from sparseflash.blockmask.recorded import Runs, mask_of_runs
from sparseflash.blockmask.unique import first_combinations
from sparseflash.masks.tiling.draws import Integers
from sparseflash.masks.tiling.listing import columns_between, cut_columns, take_ranges

Words = NDArray[np.int32]

WORDS_AT_ONCE = 1 << 20  # words made at a time: about 50 MB of temporaries


def spans(
    start: Tensor, stop: Tensor, k_len: int, *,
    limit: Tensor | None = None, rows: Tensor | None = None, cols: Tensor | None = None, block: Block = 128,
) -> BlockMask:  # fmt: skip
    """Score (q, k) is live iff

        start[q] <= k < stop[q]    or    (rows[q] or cols[k]) and k < limit[q]

    `start`, `stop`, `limit`: int64 `[q_len]`, tokens, any values; `limit` is `k_len` by default. `rows` bool `[q_len]`,
    `cols` bool `[k_len]`: the marked queries and keys, none by default.

    Time and memory are proportional to the listed tiles: all between the first start and the last stop of the queries
    of a block row, and all in marked block rows and columns.
    """
    make = partial(spans_of_heads, start, stop, k_len, [(rows, cols)], [0], limit=limit, block=block)

    def runs() -> Runs | None:
        marked = np.zeros(0) if cols is None else cols.numpy().nonzero()[0]
        if (rows is not None and rows.numpy().any()) or (len(marked) and marked[-1] - marked[0] >= len(marked)):
            return None
        size, ends = token_counts(len(start), k_len), np.zeros((4, len(start)), dtype=np.int64)
        ends[0], ends[1] = start.numpy(), stop.numpy()
        if len(marked):
            ends[2], ends[3] = marked[0], marked[-1] + 1
            if limit is not None:
                np.minimum(ends[3], limit.numpy(), out=ends[3])
        return Runs(*size, block_pair(block), ends)

    return mask_of_runs(runs, make)


def spans_of_heads(
    start: Tensor, stop: Tensor, k_len: int, marks: Sequence[tuple[Tensor | None, Tensor | None]],
    pattern: Sequence[int], *, limit: Tensor | None = None, second: tuple[Tensor, Tensor] | None = None,
    block: Block = 128,
) -> BlockMask:  # fmt: skip
    """`spans` of several heads: head h has the `(rows, cols)` of `marks[pattern[h]]`, numbered by first appearance.

    `second`: the start and the stop of a second run of each query, without marks.
    """
    block_q, block_k = block_pair(block)
    q_len, k_len = token_counts(len(start), k_len)
    row_blocks = -(-q_len // block_q)

    def of_rows(x: Tensor) -> Any:
        """An entry a query, by block rows."""
        values, past = x.numpy(), row_blocks * block_q - q_len
        return (np.concatenate([values, np.repeat(values[-1:], past)]) if past else values).reshape(row_blocks, block_q)

    def clamped(x: Tensor) -> Any:
        return np.minimum(np.maximum(of_rows(x), 0), k_len)

    run, limits = (clamped(start), clamped(stop)), None if limit is None else clamped(limit)
    other_run = None if second is None else (clamped(second[0]), clamped(second[1]))
    patterns = [
        _not_yet_listed(run, other_run, limits, None if rows is None else of_rows(rows), cols, k_len, block_k)
        for rows, cols in marks
    ]
    indptr = starts_of(np.concatenate([each.counts for each in patterns]))
    listed, kind = np.empty(indptr[-1], dtype=np.int32), np.zeros(indptr[-1], dtype=np.int32)
    offset = 0
    for each, begin, end in zip(patterns, indptr[::row_blocks], indptr[row_blocks::row_blocks]):
        take_ranges(each.columns, each.first, each.last, listed[begin:end])
        if each.kinds.any():
            kinds = each.kinds + (each.kinds > 0) * np.int32(offset) if offset else each.kinds
            take_ranges(kinds, each.first, each.last, kind[begin:end])
        for places, other in each.others:
            kind[begin:end][places] = other + offset
        offset += sum(map(len, each.words))
    every = torch.from_numpy(np.concatenate([words for each in patterns for words in each.words]))
    arrays = arrays_of_rows(
        q_len, k_len, block_q, block_k, indptr, listed, kind, len(every), every, np.array([pattern])
    )
    return BlockMask(q_len, k_len, block_q, block_k, *arrays)


class _Pattern(NamedTuple):
    """A pattern whose tiles are not listed yet: ranges of a table, each from entry `first` to entry `last`."""

    counts: Any  # tiles of each block row
    first: Integers
    last: Integers
    columns: Numbers  # the table
    kinds: Numbers  # of each entry of the table
    others: list[tuple[Any, Any]]  # places in the list, and the kinds of the tiles there
    words: list[Words]


class _Run(NamedTuple):
    """A run of keys for each query, by block rows; empty if the query sees no key."""

    starts: Integers  # [Mq, block_q]
    stops: Integers
    first: Integers  # the block columns of a block row, [Mq]; last < first if it sees no key
    last: Integers
    full: tuple[Integers, Integers]  # the block columns that all queries see completely


def _run(starts: Integers, stops: Integers, k_len: int, block_k: int) -> _Run:
    empty = stops <= starts
    starts, stops = np.where(empty, k_len, starts), np.where(empty, 0, stops)  # so that its block row is not widened
    first, last = starts.min(1) // block_k, (stops.max(1) - 1) // block_k
    no_run, most = last < first, stops.min(1)
    full = (
        (starts.max(1) + (block_k - 1)) // block_k,
        np.where(most == k_len, -(-k_len // block_k), most // block_k) - 1,
    )
    return _Run(starts, stops, np.where(no_run, 0, first), np.where(no_run, -1, last), full)


def _not_yet_listed(
    run: tuple[Integers, Integers], second: tuple[Integers, Integers] | None, limits: Integers | None, is_row: Any,
    cols: Tensor | None, k_len: int, block_k: int,
) -> _Pattern:  # fmt: skip
    starts, stops = run
    row_blocks, block_q = starts.shape
    col_blocks = -(-k_len // block_k)
    until = np.full((row_blocks, 1), k_len) if limits is None else limits
    is_marked = is_row is not None or cols is not None
    is_row = np.zeros(starts.shape, dtype=np.bool_) if is_row is None else is_row
    empty = stops <= starts
    if is_row.any():  # where all queries of a block row are marked, each sees one longer run
        longer = (is_row & (empty | (starts <= until))).all(1)[:, None]
        stops = np.where(longer, np.maximum(np.where(empty, 0, stops), until), stops)
        starts, is_row = np.where(longer, 0, starts), is_row & ~longer
    starts, stops, first, last, full = _run(starts, stops, k_len, block_k)
    no_run = last < first

    # A block row has tiles before its run, in the run and behind it: three ranges of `columns`, which lists all block
    # columns and then the marked ones.
    columns, kinds = np.arange(col_blocks, dtype=np.int32), np.zeros(col_blocks, dtype=np.int32)
    ranges_of = np.zeros((2, row_blocks, 3), dtype=np.int64)  # first and last
    ranges_of[1] = -1
    ranges_of[:, :, 1] = first, last
    full_word, words_per_row = bitmask.full_word(block_k), bitmask.words_per_row(block_k)
    words: list[Words] = []
    marked, of_key = np.zeros(0, dtype=np.int64), None
    key_number: Any = None
    busy = np.flatnonzero(is_row.any(1))
    # Every query of the block row sees the marked keys before `whole`, and none sees one behind block `reach`.
    whole, reach = until.min(1), (until.max(1) - 1) // block_k
    if is_marked:
        is_col = np.zeros((col_blocks, block_k), dtype=np.bool_)
        if cols is not None:
            is_col.reshape(-1)[:k_len] = cols.numpy()
        marked = np.flatnonzero(is_col.any(1))
        of_key, key_number = _distinct_rows(bitmask.pack(torch.from_numpy(is_col)))  # [Mk, W]
        # Kind 0 is full. The next kinds are for a marked block column and a marked block row, and recur along it.
        words = [
            np.broadcast_to(of_key[:, None, :], (len(of_key), block_q, words_per_row)),
            np.broadcast_to((is_row[busy] * np.int32(full_word))[:, :, None], (len(busy), block_q, words_per_row)),
        ]
        columns = np.concatenate([columns, marked.astype(np.int32)])
        kinds = np.concatenate([kinds, (key_number[marked] + 1).astype(np.int32)])
        end = marked.searchsorted(reach, side="right")
        ranges_of[0, :, 0] = col_blocks
        ranges_of[1, :, 0] = col_blocks - 1 + np.where(no_run, end, np.minimum(marked.searchsorted(first), end))
        ranges_of[0, :, 2] = col_blocks + np.where(no_run, end, marked.searchsorted(last, side="right"))
        ranges_of[1, :, 2] = col_blocks - 1 + end
    if len(busy):  # a marked query sees all block columns
        ranges_of[0, busy, 0], ranges_of[1, busy, 0] = 0, np.where(no_run, reach, np.minimum(first - 1, reach))[busy]
        ranges_of[0, busy, 2], ranges_of[1, busy, 2] = np.where(no_run, reach, last)[busy] + 1, reach[busy]
    if second is not None:
        other = _run(*second, k_len, block_k)
        ranges_of[:, :, 0] = other.first, np.minimum(other.last, first - 1)
        ranges_of[:, :, 2] = np.maximum(other.first, last + 1), other.last
    counts = np.maximum(ranges_of[1] - ranges_of[0] + 1, 0)
    of_row = counts.sum(1)
    begin = (of_row.cumsum() - of_row)[:, None] + counts.cumsum(1) - counts - ranges_of[0]  # plus an index in `columns`
    others: list[tuple[Any, Any]] = []

    # The words of all other tiles are computed: in a run, the tiles at its ends; outside of it, the tiles past the
    # first limit of a block row, and the tiles in which marked queries see marked keys.
    r, c = cut_columns(first, last, *full)
    cut = [(r, c, begin[r, 1] + c)]
    block_ends = np.minimum(np.arange(block_k, (col_blocks + 1) * block_k, block_k), k_len)
    alike = block_ends[marked].searchsorted(whole, side="right")
    for part in (0, 2):
        if second is not None:
            r, c = cut_columns(ranges_of[0, :, part], ranges_of[1, :, part], *other.full)
            cut.append((r, c, begin[r, part] + c))
        if len(marked):
            last_at = ranges_of[1, :, part].copy()
            last_at[busy] = -1
            r, c = columns_between(np.maximum(ranges_of[0, :, part], col_blocks + alike), last_at)
            cut.append((r, marked[c - col_blocks], begin[r, part] + c))
        if len(busy):
            lowest, highest = ranges_of[:, busy, part]
            at = begin[busy, part]
            places = (at + lowest).tolist(), (at + np.maximum(highest + 1, lowest)).tolist()
            others += [(slice(*each), 1 + len(words[0]) + n) for n, each in enumerate(zip(*places, strict=True))]
            past = block_ends.searchsorted(whole[busy], side="right")
            before = marked.searchsorted(np.minimum(highest, past - 1), side="right") - 1
            number, c = columns_between(marked.searchsorted(lowest), before)
            cut.append((busy[number], marked[c], at[number] + marked[c]))
            number, c = columns_between(np.maximum(lowest, past), highest)
            cut.append((busy[number], c, at[number] + c))

    # In a window or a chunk, the runs of many block rows have the same position relative to the tiles: block rows of
    # equal profile hold the same bits at the same distance, so bits are made once for each combination.
    r, c, place = (column[0] if len(column) == 1 else np.concatenate(column) for column in zip(*cut, strict=True))
    offset = sum(map(len, words))
    nearest = np.arange(row_blocks) * block_q // block_k
    ends = [starts, stops, *([] if limits is None else [limits]), *([] if second is None else other[:2])]
    relative = [(x - nearest[:, None] * block_k).astype(np.int32) for x in ends]
    profile = np.stack(relative if of_key is None else [*relative, is_row.astype(np.int32)], 1)
    codes = [_distinct_rows(torch.from_numpy(profile))[1][r], c - nearest[r]]
    if of_key is not None:
        codes.append(key_number[c])
    number, first_of = first_combinations(codes)
    found = []
    at_once = max(1, WORDS_AT_ONCE // (block_q * words_per_row))
    for begun in range(0, max(1, len(first_of)), at_once):
        some = first_of[begun : begun + at_once]
        a, corner = r[some], c[some, None] * block_k
        bits = bitmask.below(stops[a] - corner, block_k) & ~bitmask.below(starts[a] - corner, block_k)
        if second is not None:
            bits |= bitmask.below(other.stops[a] - corner, block_k) & ~bitmask.below(other.starts[a] - corner, block_k)
        if of_key is not None:
            seen = np.where(is_row[a][:, :, None], np.int32(full_word), of_key[key_number[c[some]]][:, None, :])
            bits |= seen if limits is None else seen & bitmask.below(limits[a] - corner, block_k)
        distinct, inverse = bitmask.deduplicate(torch.from_numpy(bits))
        words.append(distinct.numpy())
        found.append(inverse.numpy() + 1 + offset)
        offset += len(distinct)
    others.append((place, np.concatenate(found)[number]))
    first, last = ranges_of.reshape(2, -1)
    return _Pattern(of_row, first, last, columns, kinds, others, words)


def _distinct_rows(rows: Tensor) -> tuple[Words, Integers]:
    found, number = bitmask.deduplicate(rows.unsqueeze(1) if rows.ndim == 2 else rows)
    return found.numpy().reshape(-1, *rows.shape[1:]), number.numpy()

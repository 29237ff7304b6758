"""Spans: masks where each query sees one run of keys, marked queries see all keys, and all queries see marked keys.

Tiles are listed, never scanned; bits are made a word at a time, for the tiles that the end of a run cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import Block, block_pair, token_counts
from sparseflash.blockmask.build import arrays_of_rows
from sparseflash.blockmask.unique import number_by_first_appearance, number_combinations
from sparseflash.masks.tiling.draws import Integers
from sparseflash.masks.tiling.listing import columns_between, cut_columns, ranges, starts_of

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
    block_q, block_k = block_pair(block)
    q_len, k_len = token_counts(len(start), k_len)
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)

    def of_rows(x: Tensor, clamped: bool = True) -> Any:
        """An entry a query, by block rows."""
        values = x.numpy()
        if clamped:
            values = np.minimum(np.maximum(values, 0), k_len)
        past = row_blocks * block_q - q_len
        return (np.concatenate([values, np.repeat(values[-1:], past)]) if past else values).reshape(row_blocks, block_q)

    starts, stops = of_rows(start), of_rows(stop)
    limits = None if limit is None else of_rows(limit)
    until = np.full((row_blocks, 1), k_len) if limits is None else limits
    is_row = np.zeros((row_blocks, block_q), dtype=np.bool_) if rows is None else of_rows(rows, clamped=False)
    empty = stops <= starts
    if is_row.any():  # where all queries of a block row are marked, each sees one longer run
        longer = (is_row & (empty | (starts <= until))).all(1)[:, None]
        stops = np.where(longer, np.maximum(np.where(empty, 0, stops), until), stops)
        starts, empty, is_row = np.where(longer, 0, starts), empty & ~longer, is_row & ~longer
    starts, stops = np.where(empty, k_len, starts), np.where(empty, 0, stops)  # so that its block row is not widened
    first, last = starts.min(1) // block_k, (stops.max(1) - 1) // block_k
    no_run = last < first
    first, last = np.where(no_run, 0, first), np.where(no_run, -1, last)

    # A block row has tiles before its run, in the run and behind it: three ranges of `columns`, which lists all block
    # columns and then the marked ones.
    columns = np.arange(col_blocks, dtype=np.int32)
    ranges_of = np.zeros((2, row_blocks, 3), dtype=np.int64)  # first and last
    ranges_of[1] = -1
    ranges_of[:, :, 1] = first, last
    full_word, words_per_row = bitmask.full_word(block_k), bitmask.words_per_row(block_k)
    words: list[Words] = []
    marked, has_cols = np.zeros(0, dtype=np.int64), np.zeros(col_blocks, dtype=np.bool_)
    of_key, busy = None, np.flatnonzero(is_row.any(1))
    # Every query of the block row sees the marked keys before `whole`, and none sees one behind block `reach`.
    whole, reach = until.min(1), (until.max(1) - 1) // block_k
    if rows is not None or cols is not None:
        is_col = np.zeros((col_blocks, block_k), dtype=np.bool_)
        if cols is not None:
            is_col.reshape(-1)[:k_len] = cols.numpy()
        has_cols[:] = is_col.any(1)
        marked = np.flatnonzero(has_cols)
        of_key = bitmask.pack(torch.from_numpy(is_col)).numpy()  # [Mk, W]
        # Kind 0 is full. The next kinds are for a marked block column and a marked block row, and recur along it.
        words = [
            np.broadcast_to(of_key[marked][:, None, :], (len(marked), block_q, words_per_row)),
            np.broadcast_to((is_row[busy] * np.int32(full_word))[:, :, None], (len(busy), block_q, words_per_row)),
        ]
        columns = np.concatenate([columns, marked.astype(np.int32)])
        end = marked.searchsorted(reach, side="right")
        ranges_of[0, :, 0] = col_blocks
        ranges_of[1, :, 0] = col_blocks - 1 + np.where(no_run, end, np.minimum(marked.searchsorted(first), end))
        ranges_of[0, :, 2] = col_blocks + np.where(no_run, end, marked.searchsorted(last, side="right"))
        ranges_of[1, :, 2] = col_blocks - 1 + end
    if len(busy):  # a marked query sees all block columns
        ranges_of[0, busy, 0], ranges_of[1, busy, 0] = 0, np.where(no_run, reach, np.minimum(first - 1, reach))[busy]
        ranges_of[0, busy, 2], ranges_of[1, busy, 2] = np.where(no_run, reach, last)[busy] + 1, reach[busy]
    counts = np.maximum(ranges_of[1] - ranges_of[0] + 1, 0)
    indptr = starts_of(counts.sum(1))
    begin = indptr[:-1, None] + counts.cumsum(1) - counts - ranges_of[0]  # plus a place in `columns`: that in the list
    listed, kind = np.empty(indptr[-1], dtype=np.int32), np.zeros(indptr[-1], dtype=np.int32)
    for _, places, at in ranges(ranges_of[0].reshape(-1), ranges_of[1].reshape(-1)):
        listed[places] = columns[at]
        if len(marked):
            kind[places] = np.maximum(at - (col_blocks - 1), 0)

    # The words of all other tiles are computed: in a run, the tiles at its ends; outside of it, the tiles past the
    # first limit of a block row, and the tiles in which marked queries see marked keys.
    first_full = (starts.max(1) + (block_k - 1)) // block_k
    most = stops.min(1)
    r, c = cut_columns(first, last, first_full, np.where(most == k_len, col_blocks, most // block_k) - 1)
    cut = [(r, c, begin[r, 1] + c)]
    alike = np.minimum((marked + 1) * block_k, k_len).searchsorted(whole, side="right")
    for part in (0, 2):
        if len(marked):
            last_at = ranges_of[1, :, part].copy()
            last_at[busy] = -1
            r, c = columns_between(np.maximum(ranges_of[0, :, part], col_blocks + alike), last_at)
            cut.append((r, marked[c - col_blocks], begin[r, part] + c))
        if len(busy):
            number, c = columns_between(*ranges_of[:, busy, part])
            r = busy[number]
            kind[begin[r, part] + c] = number + 1 + len(marked)
            own = has_cols[c] | (whole[r] < np.minimum((c + 1) * block_k, k_len))
            cut.append((r[own], c[own], (begin[r, part] + c)[own]))

    # In a window or a chunk, the runs of many block rows have the same position relative to the tiles: block rows of
    # equal profile hold the same bits at the same distance, so bits are made once for each combination.
    r, c, place = (column[0] if len(column) == 1 else np.concatenate(column) for column in zip(*cut, strict=True))
    offset = len(marked) + len(busy)
    nearest = np.arange(row_blocks) * block_q // block_k
    ends = [starts, stops] if limits is None else [starts, stops, limits]
    relative = [(x - nearest[:, None] * block_k).astype(np.int32) for x in ends]
    codes = [_numbers(relative if of_key is None else [*relative, is_row.astype(np.int32)])[r], c - nearest[r]]
    if of_key is not None:
        codes.append(_numbers([of_key])[c])
    number, first_of = _combinations(codes)
    found = []
    at_once = max(1, WORDS_AT_ONCE // (block_q * words_per_row))
    for begun in range(0, max(1, len(first_of)), at_once):
        some = first_of[begun : begun + at_once]
        a, corner = r[some], c[some, None] * block_k
        bits = bitmask.below(stops[a] - corner, block_k) & ~bitmask.below(starts[a] - corner, block_k)
        if of_key is not None:
            seen = np.where(is_row[a][:, :, None], np.int32(full_word), of_key[c[some]][:, None, :])
            bits |= seen if limits is None else seen & bitmask.below(limits[a] - corner, block_k)
        distinct, inverse = bitmask.deduplicate(torch.from_numpy(bits))
        words.append(distinct.numpy())
        found.append(inverse.numpy() + 1 + offset)
        offset += len(distinct)
    kind[place] = np.concatenate(found)[number]
    every = torch.from_numpy(np.concatenate(words))

    def words_of(kinds: Integers) -> Tensor:
        return every.index_select(0, torch.from_numpy(kinds))

    return BlockMask(
        q_len, k_len, block_q, block_k,
        *arrays_of_rows(q_len, k_len, block_q, block_k, indptr, listed, kind, len(every), words_of),
    )  # fmt: skip


def _numbers(columns: Sequence[Words]) -> Integers:
    """A number for each distinct row of matrices of equally many rows."""
    rows = torch.from_numpy(np.stack(columns, 1))
    return bitmask.deduplicate(rows)[1].numpy()


def _combinations(codes: Sequence[Integers]) -> tuple[Integers, Integers]:
    """A number for each combination of codes, by first appearance, and where each combination appears first."""
    if len(codes[0]) <= bitmask.FEW:
        known: dict[tuple[int, ...], int] = {}
        number = [known.setdefault(each, len(known)) for each in zip(*[x.tolist() for x in codes], strict=True)]
        numbered = np.array(number, dtype=np.int64)
        return numbered, np.unique(numbered, return_index=True)[1]
    found, first = number_by_first_appearance(number_combinations([torch.from_numpy(x) for x in codes])[0])
    return found.numpy(), first.numpy()

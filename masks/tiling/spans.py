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
from sparseflash.blockmask.build import arrays_of
from sparseflash.blockmask.unique import number_by_first_appearance, number_combinations
from sparseflash.masks.tiling.draws import Integers
from sparseflash.masks.tiling.listing import columns_between

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
    empty = stops <= starts
    starts, stops = np.where(empty, k_len, starts), np.where(empty, 0, stops)  # so that its block row is not widened
    limits = None if limit is None else of_rows(limit)
    first, last = starts.min(1) // block_k, (stops.max(1) - 1) // block_k

    i, j = columns_between(first, last)
    least, most = starts.max(1), stops.min(1)
    first_full = (least + (block_k - 1)) // block_k
    last_full = np.where(most == k_len, col_blocks, most // block_k) - 1
    # All tiles of a run between these are full, and tiles can number millions: only the others are looked at.
    last_cut = np.minimum(np.where(first_full <= last_full, first_full - 1, last), last)  # before the full ones
    first_cut = np.where(first_full <= last_full, last_full + 1, last + 1)  # behind them
    place = np.maximum(last - first + 1, 0).cumsum() - (last + 1)  # of the tile (i, j) in the list: place[i] + j
    kind = np.zeros_like(i)
    for r, c in (columns_between(first, last_cut), columns_between(first_cut, last)):
        kind[place[r] + c] = -1
    listed = [(i, j, kind)]
    full_word, words_per_row = bitmask.full_word(block_k), bitmask.words_per_row(block_k)
    words: list[Words] = []
    marked = busy = np.zeros(0, dtype=np.int64)
    is_row = of_key = None
    if rows is not None or cols is not None:
        until = np.full((row_blocks, block_q), k_len) if limits is None else limits
        # Every query of the block row sees the marked keys below `whole`, and none sees one behind block `reach`.
        whole, reach = until.min(1), (until.max(1) - 1) // block_k
        is_row = np.zeros((row_blocks, block_q), dtype=np.bool_) if rows is None else of_rows(rows, clamped=False)
        is_col = np.zeros((col_blocks, block_k), dtype=np.bool_)
        if cols is not None:
            is_col.reshape(-1)[:k_len] = cols.numpy()
        has_rows: Any = is_row.any(1)
        has_cols: Any = is_col.any(1)
        marked, busy = np.flatnonzero(has_cols), np.flatnonzero(has_rows)
        of_key = bitmask.pack(torch.from_numpy(is_col)).numpy()  # [Mk, W]
        # Kind 0 is full. The next kinds are for a marked block column and a marked block row, and recur along it.
        words = [
            np.broadcast_to(of_key[marked][:, None, :], (len(marked), block_q, words_per_row)),
            np.broadcast_to((is_row[busy] * np.int32(full_word))[:, :, None], (len(busy), block_q, words_per_row)),
        ]
        if len(marked):
            # The marked columns before the run of a block row, and those behind it; without a run, all are before it.
            end = np.searchsorted(marked, reach, side="right")
            before = np.minimum(np.searchsorted(marked, first), end)
            behind = np.searchsorted(marked, last, side="right")
            before, behind = (np.where(last < first, end, x) for x in (before, behind))
            alike = np.where(has_rows, -1, whole)  # before this key all queries see the same of marked columns
            ends_at = np.minimum((marked + 1) * block_k, k_len)
            for start_at, stop_at in ((np.zeros_like(end), before), (behind, end)):
                i, at = columns_between(start_at, stop_at - 1)
                listed.append((i, marked[at], np.where(alike[i] >= ends_at[at], at + 1, -1)))
        if len(busy):
            at, j = columns_between(np.zeros_like(busy), reach[busy])
            i = busy[at]
            outside = ((j < first[i]) | (j > last[i])) & ~has_cols[j]
            i, j, at = i[outside], j[outside], at[outside]
            repeats = whole[i] >= np.minimum((j + 1) * block_k, k_len)
            listed.append((i, j, np.where(repeats, at + 1 + len(marked), -1)))

    # In a window or a chunk, the runs of many block rows have the same position relative to the tiles: block rows of
    # equal profile hold the same bits at the same distance, so bits are made once for each combination.
    i, j, kind = (column[0] if len(column) == 1 else np.concatenate(column) for column in zip(*listed, strict=True))
    offset = len(marked) + len(busy)
    own = np.flatnonzero(kind < 0)
    r, c = i[own], j[own]
    nearest = np.arange(row_blocks) * block_q // block_k
    ends = [starts, stops] if limits is None else [starts, stops, limits]
    relative = [(x - nearest[:, None] * block_k).astype(np.int32) for x in ends]
    codes = [_numbers(relative if is_row is None else [*relative, is_row.astype(np.int32)])[r], c - nearest[r]]
    if of_key is not None:
        codes.append(_numbers([of_key])[c])
    number, first_of = _combinations(codes)
    found = []
    at_once = max(1, WORDS_AT_ONCE // (block_q * words_per_row))
    for begin in range(0, max(1, len(first_of)), at_once):
        some = first_of[begin : begin + at_once]
        a, corner = r[some], c[some, None] * block_k
        made = bitmask.below(stops[a] - corner, block_k) & ~bitmask.below(starts[a] - corner, block_k)
        if is_row is not None and of_key is not None:
            seen = np.where(is_row[a][:, :, None], np.int32(full_word), of_key[c[some]][:, None, :])
            made |= seen if limits is None else seen & bitmask.below(limits[a] - corner, block_k)
        distinct, inverse = bitmask.deduplicate(torch.from_numpy(made))
        words.append(distinct.numpy())
        found.append(inverse.numpy() + 1 + offset)
        offset += len(distinct)
    kind[own] = np.concatenate(found)[number]
    part = tuple(torch.from_numpy(x) for x in (i, j, kind, np.concatenate(words)))
    return BlockMask(q_len, k_len, block_q, block_k, *arrays_of(q_len, k_len, block_q, block_k, [part], 1, 1))  # type: ignore[list-item]


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

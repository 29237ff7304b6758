"""Spans: masks where each query sees one run of keys, marked queries see all keys, and all queries see marked keys.

Tiles are listed, never scanned; bits are made a word at a time, for the tiles that the end of a run cuts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import Block, block_pair, token_counts
from sparseflash.blockmask.build import arrays_of
from sparseflash.blockmask.unique import number_by_first_appearance, number_combinations
from sparseflash.masks.tiling.listing import between

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
    start, stop = start.clamp(0, k_len), stop.clamp(0, k_len)
    empty = stop <= start
    start, stop = start.masked_fill(empty, k_len), stop.masked_fill(empty, 0)  # so that its block row is not widened
    no_limit = limit is None
    limit = torch.full((q_len,), k_len, device="cpu") if limit is None else limit.clamp(0, k_len)
    rows = torch.zeros(q_len, dtype=torch.bool, device="cpu") if rows is None else rows
    cols = torch.zeros(k_len, dtype=torch.bool, device="cpu") if cols is None else cols
    start, stop, limit, rows = (
        torch.cat([x, x[-1:].expand(row_blocks * block_q - q_len)]).view(row_blocks, block_q)
        for x in (start, stop, limit, rows)
    )
    cols = torch.cat([cols, cols.new_zeros(col_blocks * block_k - k_len)]).view(col_blocks, block_k)
    has_rows, has_cols = rows.any(1), cols.any(1)
    first, last = start.amin(1) // block_k, (stop.amax(1) - 1).div(block_k, rounding_mode="floor")
    whole = limit.amin(1)

    i, j = between(first, last)
    least, most = start.amax(1), stop.amin(1)
    first_full = (least + (block_k - 1)).div(block_k, rounding_mode="floor")
    last_full = torch.where(most == k_len, col_blocks, most.div(block_k, rounding_mode="floor")) - 1
    # All tiles of a run between these are full, and tiles can number millions: only the others are looked at.
    last_cut = torch.where(first_full <= last_full, first_full - 1, last).minimum(last)  # before the full ones
    first_cut = torch.where(first_full <= last_full, last_full + 1, last + 1)  # behind them
    place = (last - first + 1).clamp(min=0).cumsum(0) - (last + 1)  # of the tile (i, j) in the list: place[i] + j
    cut = [place[r] + c for r, c in (between(first, last_cut), between(first_cut, last))]
    kind = torch.zeros_like(i)
    kind[torch.cat(cut)] = -1
    listed = [(i, j, kind)]
    reach = (limit.amax(1) - 1).div(block_k, rounding_mode="floor")
    marked, busy = has_cols.nonzero()[:, 0], has_rows.nonzero()[:, 0]
    if len(marked):
        # The marked columns before the run of a block row, and those behind it; without a run, all are before it.
        end = torch.searchsorted(marked, reach, right=True)
        before, behind = torch.searchsorted(marked, first), torch.searchsorted(marked, last, right=True)
        before, behind = (torch.where(last < first, end, x) for x in (before.minimum(end), behind))
        alike = torch.where(has_rows, -1, whole)  # before this key all queries see the same of marked columns
        stops = ((marked + 1) * block_k).clamp(max=k_len)
        for start_at, stop_at in ((torch.zeros_like(end), before), (behind, end)):
            i, at = between(start_at, stop_at - 1)
            j = marked[at]
            listed.append((i, j, torch.where(alike[i] >= stops[at], at + 1, -1)))
    if len(busy):
        at, j = between(torch.zeros_like(busy), reach[busy])
        i = busy[at]
        outside = ((j < first[i]) | (j > last[i])) & ~has_cols[j]
        i, j, at = i[outside], j[outside], at[outside]
        repeats = whole[i] >= ((j + 1) * block_k).clamp(max=k_len)
        listed.append((i, j, torch.where(repeats, at + 1 + len(marked), -1)))

    # Kind 0 is full. The next kinds are for a marked block column and a marked block row, and recur along it.
    i, j, kind = (column[0] if len(column) == 1 else torch.cat(column) for column in zip(*listed, strict=True))
    full_word = bitmask.full_word(block_k)
    of_key = bitmask.pack(cols)  # [Mk, W]
    words_per_row = of_key.shape[1]
    words = [
        of_key[marked][:, None, :].expand(-1, block_q, -1),
        (rows[busy].to(torch.int32) * full_word)[:, :, None].expand(-1, -1, words_per_row),
    ]
    # In a window or a chunk, the runs of many block rows have the same position relative to the tiles: block rows of
    # equal profile hold the same bits at the same distance, so bits are made once for each combination.
    offset = len(marked) + len(busy)
    own = torch.from_numpy(np.flatnonzero(kind.numpy() < 0))
    r, c = i[own], j[own]
    nearest = torch.arange(row_blocks, device="cpu") * block_q // block_k
    ends = [start, stop] if no_limit else [start, stop, limit]
    relative = [(x - nearest[:, None] * block_k).to(torch.int32) for x in ends]
    profile = bitmask.deduplicate(torch.stack([*relative, rows.to(torch.int32)], 1))[1]
    marks = bitmask.deduplicate(of_key[:, None, :])[1]
    number, first = number_by_first_appearance(number_combinations([profile[r], c - nearest[r], marks[c]])[0])
    found = []
    for some in first.split(max(1, WORDS_AT_ONCE // (block_q * words_per_row))):
        a, corner = r[some], c[some, None] * block_k
        before, until = (below(x.index_select(0, a) - corner, block_k) for x in (start, stop))  # [E, block_q, W]
        made = until & ~before
        seen = torch.where(rows[a][:, :, None], full_word, of_key[c[some]][:, None, :])
        made |= seen if no_limit else seen & below(limit[a] - corner, block_k)
        made, inverse = bitmask.deduplicate(made)
        words.append(made)
        found.append(inverse + 1 + offset)
        offset += len(made)
    kind[own] = torch.cat(found)[number]
    part = (i, j, kind, torch.cat(words))
    return BlockMask(q_len, k_len, block_q, block_k, *arrays_of(q_len, k_len, block_q, block_k, [part], 1, 1))


def below(stop: Tensor, block_k: int) -> Tensor:
    """`bitmask.below` for tensors."""
    return torch.from_numpy(bitmask.below(stop.numpy(), block_k))

"""The tiles of a pattern where every key has a few intervals of queries that do not see it.

Only tiles that an interval's end cuts are evaluated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask import bitmask
from sparseflash.blockmask.build import SCORES_AT_ONCE, Part


def tiles_outside(intervals: list[tuple[Tensor, Tensor]], q_len: int, k_len: int, block_q: int, block_k: int) -> Part:
    """The tiles of one pattern.

    `intervals`: the queries that do not see a key, `[start, stop)`, int64 `[Nk]` each.
    """
    device = intervals[0][0].device
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)
    top = torch.arange(row_blocks, device=device)[:, None] * block_q
    bottom = (top + block_q).clamp(max=q_len)
    keys = torch.arange(col_blocks * block_k, device=device).clamp(max=k_len - 1).view(col_blocks, block_k)
    dead = torch.zeros(row_blocks, col_blocks, dtype=torch.bool, device=device)
    cut = dead.clone()
    for start, stop in intervals:
        start, stop = start[keys], stop[keys]
        dead |= (start.amax(1) <= top) & (stop.amin(1) >= bottom)
        some = stop > start
        cut |= (start.masked_fill(~some, q_len).amin(1) < bottom) & (stop.masked_fill(~some, 0).amax(1) > top)

    at_ends = (cut & ~dead).nonzero()
    rows, cols, tile, words = _cut_tiles(intervals, at_ends[:, 0], at_ends[:, 1], keys, block_q)
    i, j = (~cut & ~dead).nonzero(as_tuple=True)
    return torch.cat([rows, i]), torch.cat([cols, j]), torch.cat([tile, torch.zeros_like(i)]), words


def _cut_tiles(intervals: list[tuple[Tensor, Tensor]], rows: Tensor, cols: Tensor, keys: Tensor, block_q: int) -> Part:
    """The tiles at the given rows and columns, int64 `[E]`.

    `keys` int64 `[Mk, block_k]`: the keys of each block column. Tiles with equal bounds relative to their first row are
    evaluated once.
    """
    block_k, device = keys.shape[1], rows.device
    no_words = torch.zeros(0, block_q, bitmask.words_per_row(block_k), dtype=torch.int32, device=device)
    kinds, found, offset = [rows[:0]], [no_words], 0
    query = torch.arange(block_q, device=device)[:, None]
    for e in torch.arange(len(rows), device=device).split(max(1, SCORES_AT_ONCE // (2 * len(intervals) * block_k))):
        k, top = keys[cols[e]], rows[e][:, None] * block_q
        bounds = []
        for start, stop in intervals:
            first, last = (start[k] - top).clamp(0, block_q), (stop[k] - top).clamp(0, block_q)
            bounds += [first.where(first < last, 0), last.where(first < last, 0)]
        distinct, inverse = bitmask.deduplicate(torch.stack(bounds, dim=1).to(torch.int32))  # [T, 2 n, block_k]
        for some in distinct.split(max(1, SCORES_AT_ONCE // (block_q * block_k))):
            first, last = some[:, 0::2, None], some[:, 1::2, None]
            found.append(bitmask.pack(((query < first) | (query >= last)).all(1)))
        kinds.append(inverse + 1 + offset)
        offset += len(distinct)
    return rows, cols, torch.cat(kinds), torch.cat(found)

"""The runs of queries that do not see a key, for every key of a mask, in time proportional to the live tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.build import SCORES_AT_ONCE
from sparseflash.blockmask.csr import entries_of_pattern, take_rows

MOST_RUNS = 3  # the most live runs of a column: between two dead runs and the ends


def dead_runs(mask: BlockMask, p: int) -> tuple[Tensor, Tensor, int]:
    """The runs of dead queries of each key of one pattern, `(start, stop, most)`.

    start, stop: int64 `[most, MOST_RUNS + 1]`, in order, some empty. most: the first key that has more runs, or Nk.
    """
    col_blocks, device = mask.blocks[1], mask.device
    indptr, indices, tile = mask.columns
    cols, span = entries_of_pattern(indptr, p, col_blocks)
    rows, tile = indices[span].long(), tile[span].long()
    words = bitmask.choices(mask.bits, mask.block_k)  # [T + 2, block_q, W]
    # A score begins a live run if the score above it is dead, and ends one if the score below is. Inside a tile this
    # depends only on the tile; its first and last row depend on the tiles that touch it.
    joined = (cols.diff() == 0) & (rows.diff() == 1)
    none = torch.zeros_like(words[tile[:1], 0])
    first, last = words[tile, 0], words[tile, -1]
    above = torch.cat([none, torch.where(joined[:, None], last[:-1], 0)])[: len(rows)]
    below = torch.cat([torch.where(joined[:, None], first[1:], 0), none])[: len(rows)]
    begins = torch.cat([torch.zeros_like(words[:, :1]), words[:, 1:] & ~words[:, :-1]], dim=1)
    ends = torch.cat([words[:, :-1] & ~words[:, 1:], torch.zeros_like(words[:, :1])], dim=1)
    begins_at_edge, ends_at_edge = first & ~above, last & ~below

    most = mask.k_len
    counts = torch.zeros(col_blocks, mask.block_k, dtype=torch.int64, device=device)
    inner = bitmask.unpack(begins, mask.block_k).sum(1)  # [T + 2, block_k]
    some = inner.any(-1)[tile] | (begins_at_edge != 0).any(-1)
    for e in some.nonzero()[:, 0].split(max(1, SCORES_AT_ONCE // mask.block_k)):
        counts.index_add_(0, cols[e], inner[tile[e]] + bitmask.unpack(begins_at_edge[e], mask.block_k))
    many = (counts.view(-1)[: mask.k_len] > MOST_RUNS).nonzero()
    if len(many):
        most = int(many[0])

    start = torch.full((most, MOST_RUNS + 1), mask.q_len, dtype=torch.int64, device=device)
    stop = start.clone()
    start[:, 0] = 0  # dead runs begin at the top and where live runs end, and end where live runs begin
    for inside, edge, edge_row, table, shift in (
        (begins, begins_at_edge, 0, stop, 0),
        (ends, ends_at_edge, mask.block_q - 1, start, 1),
    ):
        q, k = _places(inside, edge, edge_row, rows, cols, tile, most, mask)
        k, order = _sorted(k, q)
        place = torch.arange(len(k), device=device) - torch.searchsorted(k, k)
        table[k, place + shift] = q[order] + shift
    return start, stop, most


def _sorted(k: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    by_query = torch.argsort(q)
    keys, by_key = torch.sort(k[by_query], stable=True)
    return keys, by_query[by_key]


def _places(
    inside: Tensor, edge: Tensor, edge_row: int, rows: Tensor, cols: Tensor, tile: Tensor, stop: int, mask: BlockMask
) -> tuple[Tensor, Tensor]:
    """The query and key of the set bits of all tiles, before key `stop`.

    inside: the bits inside a tile, which are the same wherever it occurs, `[T + 2, block_q, W]`; edge: the bits of each
    entry in row `edge_row`, `[E, W]`.
    """
    t, q, k = bitmask.unpack(inside, mask.block_k).nonzero(as_tuple=True)
    entry, bit = take_rows(torch.searchsorted(t, torch.arange(len(inside) + 1, device=t.device)), tile)
    on_edge = (edge != 0).any(-1).nonzero()[:, 0]
    which, edge_k = bitmask.unpack(edge[on_edge], mask.block_k).nonzero(as_tuple=True)
    entry, q, k = (
        torch.cat([entry, on_edge[which]]),
        torch.cat([q[bit], torch.full_like(edge_k, edge_row)]),
        torch.cat([k[bit], edge_k]),
    )
    q, k = rows[entry] * mask.block_q + q, cols[entry] * mask.block_k + k
    return q[k < stop], k[k < stop]

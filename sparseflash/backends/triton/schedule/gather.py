"""Makes lists of gathered tiles. A gathered tile consists of several blocks from anywhere in a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.schedule.worklists import TileLists
from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.csr import row_of_entry
from sparseflash.blockmask.ops.tilelist import in_chunks
from sparseflash.limits import check_count


def gathered_keys(mask: BlockMask, streamed: int) -> TileLists:
    """The lists of rows in tiles of `mask.block_q x streamed` scores, each with the row's next few blocks of keys."""
    parts = streamed // mask.block_k
    known = bitmask.choices(mask.bits, mask.block_k)
    grouped = _group(mask.indptr, mask.indices, mask.tile, parts, past=mask.blocks[1], dead=len(known) - 1)
    tiling = Tiling(mask.block_q, streamed, mask.block_k)
    return _lists(
        grouped, lambda some: bitmask.side_by_side(known[some], mask.block_k).flatten(1), known[0].numel() * parts,
        tiling,
    )  # fmt: skip


def gathered_queries(mask: BlockMask, streamed: int) -> TileLists:
    """The lists of columns in tiles of `streamed x mask.block_k` scores, each with the column's next few blocks."""
    parts = streamed // mask.block_q
    known = bitmask.choices(mask.bits, mask.block_k)
    grouped = _group(*mask.columns, parts, past=mask.blocks[0], dead=len(known) - 1)
    tiling = Tiling(mask.block_k, streamed, mask.block_q)
    return _lists(grouped, lambda some: known[some].flatten(1), known[0].numel() * parts, tiling)


@dataclass(frozen=True)
class _Grouped:
    """The blocks of every row in groups of `parts`; the groups with only full blocks come first."""

    start: Tensor  # int32 [rows]
    full: Tensor  # int32 [rows]
    count: Tensor  # int32 [rows]
    index: Tensor  # int32 [tiles + 1, parts]
    kinds: Tensor  # int64 [tiles + 1, parts], the tile number of each block; `dead` where a group has none


def _group(indptr: Tensor, index: Tensor, tile: Tensor, parts: int, *, past: int, dead: int) -> _Grouped:
    """Block numbers increase among the full groups and among the others, as `walk.cut_at_length` requires."""
    rows = row_of_entry(indptr, len(index))
    is_full = tile == 0
    full_before = torch.cat([indptr.new_zeros(1), is_full.cumsum(0, dtype=torch.int32)])
    starts = full_before[indptr.long()]
    full = starts.diff() // parts  # groups
    among_full = full_before[:-1] - starts[rows]
    in_full_group = is_full & (among_full < (full * parts)[rows])
    _, order = torch.sort(rows * 2 + ~in_full_group, stable=True)

    count = -(-indptr.diff() // parts)
    start = count.cumsum(0) - count
    place = torch.arange(len(index), device=index.device) - indptr[rows]
    at = (start[rows] + place // parts, place % parts)
    total = int(count.sum())
    check_count("blocks of gathered tiles", total + 1, parts, remedy="Use larger blocks.")
    blocks = torch.full((total + 1, parts), past, dtype=torch.int32, device=index.device)
    blocks[at] = index[order]
    kinds = torch.full((total + 1, parts), dead, dtype=torch.int64, device=index.device)
    kinds[at] = tile[order].long()
    return _Grouped(start.to(torch.int32), full.to(torch.int32), count.to(torch.int32), blocks, kinds)


def _lists(grouped: _Grouped, joined: Callable[[Tensor], Tensor], words_each: int, tiling: Tiling) -> TileLists:
    """The lists of grouped blocks. joined: makes the words of tiles [C, words] from the kinds of blocks [C, parts]."""
    partial = (grouped.kinds != 0).any(1)
    recipes, number = bitmask.deduplicate(grouped.kinds[partial].unsqueeze(-1))
    tile = torch.zeros(len(partial), dtype=torch.int32, device=partial.device)
    tile[partial] = (number + 1).to(torch.int32)
    index, words = grouped.index.view(-1), in_chunks(joined, recipes.squeeze(-1), words_each).reshape(-1)
    return TileLists(grouped.start, grouped.full, grouped.count, index, tile, words, tiling)

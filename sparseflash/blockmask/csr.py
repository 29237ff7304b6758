"""Compressed sparse rows: the row of each entry, and the transpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseflash.blockmask.cache import mask_cache, once
from sparseflash.limits import check_count

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask


def row_of_entry(indptr: Tensor, count: int) -> Tensor:
    """The row of each entry: int64 `[count]`, without synchronising with the device.

    `indptr` starts at 0. Entries at or past `indptr[-1]`, the unused capacity of a dynamic mask, have the number of
    rows.
    """
    # Not repeat_interleave: on the CPU it wakes all threads even for a short array.
    return torch.searchsorted(indptr[1:], torch.arange(count, dtype=indptr.dtype, device=indptr.device), right=True)


def stored_tiles(mask: BlockMask) -> tuple[Tensor, Tensor, Tensor]:
    """`(row, column, tile)` of every stored tile, int64 `[nnz]`, with `row = p * Mq + i`; synchronises for a dynamic
    mask.
    """
    count = int(mask.indptr[-1]) if mask.dynamic else len(mask.indices)
    return row_of_entry(mask.indptr, count), mask.indices[:count].long(), mask.tile[:count].long()


def columns_of(
    indptr: Tensor, indices: Tensor, tile: Tensor, row_blocks: int, col_blocks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`BlockMask.columns` from the arrays, cached with the indices. Unused capacity of a dynamic mask is 0 in them."""

    def transposed() -> tuple[Tensor, Tensor, Tensor]:
        rows = row_of_entry(indptr, len(indices))
        patterns = (len(indptr) - 1) // row_blocks
        check_count("patterns x block columns", patterns, col_blocks, remedy="Use larger blocks.")
        column = rows // row_blocks * col_blocks + indices
        # Unused capacity is sorted last, as one more pattern.
        narrow = torch.int16 if (patterns + 1) * col_blocks <= torch.iinfo(torch.int16).max else torch.int64
        column, order = torch.sort(column.to(narrow), stable=True)
        starts = torch.arange(patterns * col_blocks + 1, dtype=narrow, device=indptr.device)
        return (
            torch.searchsorted(column, starts).to(torch.int32),
            (rows % row_blocks)[order].to(torch.int32),
            torch.where(rows < len(indptr) - 1, tile, 0)[order],
        )

    return once(mask_cache(indices), "columns", transposed)


def may_vary_in_size(array: Tensor) -> None:
    """Tells torch.compile that the size of the array may change, so that masks with other tile counts do not recompile.

    Sets the same marks as `torch._dynamo.maybe_mark_dynamic(array, 0)`, whose import takes a second.
    """
    array._dynamo_weak_dynamic_indices = {0}  # type: ignore[attr-defined]
    array._has_dynamo_dim_marking = True  # type: ignore[attr-defined]

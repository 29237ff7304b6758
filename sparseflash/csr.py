"""Compressed sparse rows: the transpose, and where everything derived from a mask's arrays is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask


def derived(indices: Tensor) -> dict[Any, Any]:
    """What has been derived from a mask's arrays so far: its transpose, its execution plans.

    Kept on the array itself, because the registered operator carries only tensors: whoever holds the indices finds
    the plans, in eager mode, in the backward and under torch.compile, and they die with the mask.
    """
    cache: dict[Any, Any] | None = getattr(indices, "_sparseflash", None)
    if cache is None:
        cache = {}
        indices._sparseflash = cache  # type: ignore[attr-defined]
    return cache


def may_be_counted(indices: Tensor) -> None:
    """Says of a mask's array that the host may wait for its numbers, once. Loose ones, made at every step, are not."""
    indices._sparseflash_countable = True  # type: ignore[attr-defined]


def is_countable(indices: Tensor) -> bool:
    """Whether `may_be_counted` was said of it. Not so of what torch.compile makes inside a graph."""
    return getattr(indices, "_sparseflash_countable", False)


def row_of_entry(indptr: Tensor, count: int) -> Tensor:
    """The row of each entry: int64 `[count]`, without asking the device for anything.

    `indptr` starts at 0. Entries at or past `indptr[-1]`, the room of a loose mask, get the number past the last row.
    """
    rows = torch.arange(len(indptr), device=indptr.device)
    return torch.repeat_interleave(rows, indptr.diff(append=indptr.new_full((1,), count)).long(), output_size=count)


def stored_tiles(mask: BlockMask) -> tuple[Tensor, Tensor, Tensor]:
    """`(row, column, tile)` of every stored tile, int64 `[nnz]`, with `row = p * Mq + i`; waits for a loose mask."""
    count = int(mask.indptr[-1]) if mask.loose else len(mask.indices)
    return row_of_entry(mask.indptr, count), mask.indices[:count].long(), mask.tile[:count].long()


def columns_of(
    indptr: Tensor, indices: Tensor, tile: Tensor, row_blocks: int, col_blocks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`BlockMask.columns` from the arrays, cached with the indices."""
    cache = derived(indices)
    if "columns" not in cache:
        rows = row_of_entry(indptr, len(indices))
        patterns = (len(indptr) - 1) // row_blocks
        column = rows // row_blocks * col_blocks + indices
        column, order = torch.sort(column, stable=True)
        starts = torch.arange(patterns * col_blocks + 1, device=indptr.device)
        cache["columns"] = (
            torch.searchsorted(column, starts).to(torch.int32),
            (rows % row_blocks)[order].to(torch.int32),
            tile[order],
        )
    columns: tuple[Tensor, Tensor, Tensor] = cache["columns"]
    return columns


def may_vary_in_size(array: Tensor) -> None:
    """Tells torch.compile that another mask may have another number of tiles, so that it need not compile again.

    The same marks as `torch._dynamo.maybe_mark_dynamic(array, 0)`, without the second that importing it costs.
    """
    array._dynamo_weak_dynamic_indices = {0}  # type: ignore[attr-defined]
    array._has_dynamo_dim_marking = True  # type: ignore[attr-defined]

"""Compressed sparse rows: the row of each entry, and the transpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask.cache import mask_cache, once
from sparseflash.limits import check_count

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask


def are_on_host(*arrays: Tensor) -> bool:
    """Whether NumPy can read these arrays, and no dispatch mode must see the operations.

    On short lists NumPy takes half as long as PyTorch's operations.
    """
    if torch._C._len_torch_dispatch_stack():
        return False
    return all([x.device.type == "cpu" and type(x) is Tensor for x in arrays])


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


def take_rows(indptr: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of some CSR rows, which may repeat: `(which, entry)`, where entry `entry[n]` is in row
    `rows[which[n]]`.
    """
    starts = indptr[rows].long()
    counts = indptr[rows + 1].long() - starts
    which = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), counts)
    first = counts.cumsum(0) - counts
    return which, torch.arange(len(which), device=rows.device) + (starts - first)[which]


def entries_of_pattern(indptr: Tensor, number: int, row_blocks: int) -> tuple[Tensor, slice]:
    """The block row of each tile of one pattern, int64 `[E]`, and the part of the lists that holds these tiles."""
    starts = indptr[number * row_blocks : (number + 1) * row_blocks + 1].long()
    first, stop = int(starts[0]), int(starts[-1])
    return row_of_entry(starts - first, stop - first), slice(first, stop)


def columns_of(
    indptr: Tensor, indices: Tensor, tile: Tensor, row_blocks: int, col_blocks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`BlockMask.columns` from the arrays, cached with the indices. Unused capacity of a dynamic mask is 0 in them."""

    def transposed() -> tuple[Tensor, Tensor, Tensor]:
        if are_on_host(indptr, indices, tile):
            return _transposed_on_host(indptr, indices, tile, row_blocks, col_blocks)
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


def _transposed_on_host(
    indptr: Tensor, indices: Tensor, tile: Tensor, row_blocks: int, col_blocks: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`columns_of` by NumPy."""
    starts, stored = indptr.numpy(), int(indptr[-1])
    patterns = (len(starts) - 1) // row_blocks
    check_count("patterns x block columns", patterns, col_blocks, remedy="Use larger blocks.")
    rows = starts[1:].searchsorted(np.arange(len(indices), dtype=starts.dtype), side="right")
    column = rows // row_blocks * col_blocks + indices.numpy()
    # Unused capacity is sorted last, as one more pattern.
    column = column.astype(np.int16 if (patterns + 1) * col_blocks <= np.iinfo(np.int16).max else np.int64)
    order = column.argsort(kind="stable")
    made = column[order].searchsorted(np.arange(patterns * col_blocks + 1, dtype=column.dtype))
    of_columns = np.zeros(len(order), dtype=np.int32)
    of_columns[:stored] = tile.numpy()[order[:stored]]
    found = made.astype(np.int32), (rows % row_blocks)[order].astype(np.int32), of_columns
    return torch.from_numpy(found[0]), torch.from_numpy(found[1]), torch.from_numpy(found[2])


def may_vary_in_size(array: Tensor) -> None:
    """Tells torch.compile that the size of the array may change, so that masks with other tile counts do not recompile.

    Sets the same marks as `torch._dynamo.maybe_mark_dynamic(array, 0)`, whose import takes a second.
    """
    array._dynamo_weak_dynamic_indices = {0}  # type: ignore[attr-defined]
    array._has_dynamo_dim_marking = True  # type: ignore[attr-defined]

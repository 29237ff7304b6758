"""Plans on the host by NumPy: on the short lists of a small mask, PyTorch's operations take several times as long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sparseflash.backends.triton.schedule.longest_first import fraction_bits
from sparseflash.backends.triton.schedule.work_item import ITEM, WorkItem

if TYPE_CHECKING:
    from sparseflash.backends.triton.schedule.worklists import TileLists


def full_first(
    indptr: Tensor, index: Tensor, tile: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`(start, full, count, index, tile)` of `TileLists`: see `worklists.full_first`."""
    starts, partial, tiles = indptr.numpy(), tile.numpy() > 0, len(tile)
    row = starts[1:].searchsorted(np.arange(tiles, dtype=starts.dtype), side="right")
    order = np.minimum(2 * row + partial, 2 * (len(starts) - 1)).argsort(kind="stable")
    full_before = np.zeros(tiles + 1, dtype=np.int32)
    np.cumsum(~partial, out=full_before[1:])
    full_before = full_before[starts]
    blocks, kinds = np.zeros(tiles + 1, dtype=np.int32), np.zeros(tiles + 1, dtype=np.int32)  # with a trailing zero
    blocks[:tiles], kinds[:tiles] = index.numpy()[order], tile.numpy()[order]
    full, count = full_before[1:] - full_before[:-1], starts[1:] - starts[:-1]
    made = [torch.from_numpy(x) for x in (full, count, blocks, kinds)]
    return indptr[:-1], made[0], made[1], made[2], made[3]


def work_of(lists: TileLists, pattern: Tensor, length: int, tile: int) -> Tensor:
    """The work items for `pattern [B, H, group]`, none of them cut, as the kernels read them and in the order in which
    programs start: int32 `[B * H * T, group, ITEM]`.
    """
    group, held = pattern.shape[-1], lists.tiling.held
    block_row = np.arange(-(-length // tile), dtype=np.int32) * tile // held  # [T]
    first_row = pattern.numpy() * -(-length // held)
    row = (first_row[:, :, None] + block_row[:, None]).reshape(-1, group)  # [B, H, T, group]
    start, full, count = (x.numpy()[row] for x in (lists.start, lists.full, lists.count))
    index = lists.index.numpy().reshape(len(lists.tile), -1)[:, 0]  # kernels do not read this block for gathered tiles
    masked = start + full
    work = WorkItem(
        number=np.arange(len(row), dtype=np.int32)[:, None], start=start, full=full, count=count,
        full_block=index[start], partial_block=index[masked], partial_tile=lists.tile.numpy()[masked], part=0,
    )  # fmt: skip
    made = np.empty((*row.shape, ITEM.value), dtype=np.int32)
    for place, numbers in enumerate(work):
        made[:, :, place] = numbers
    # As in `longest_first.start_order`.
    highest = np.maximum(count.sum(1), 1).astype(np.float32).view(np.int32) >> (23 - fraction_bits(len(row)))
    return torch.from_numpy(made[(-highest).argsort(kind="stable")])

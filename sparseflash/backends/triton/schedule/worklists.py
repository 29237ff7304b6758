"""The lists of tiles that the kernels walk, one per row or column of tiles, and the work items that refer to them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sparseflash.backends.triton.schedule import host_plan
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.blockmask.csr import are_on_host, row_of_entry
from sparseflash.blockmask.streams import ReadyEvent
from sparseflash.blockmask.transfer import to_device
from sparseflash.limits import check_count


@dataclass(frozen=True)
class TileLists:
    """The tile list of every row (or column): row r has the tiles `start[r] : start[r] + count[r]`.

    The first `full[r]` of them are full. Tile t is at block `index[t]`; `tile[t]` is the number of its bits in `words`,
    or 0 for a full tile. If tiles are gathered from G blocks each, their blocks are `index[t * G : (t + 1) * G]`, and
    the last tile of a row is padded with a block number past the end. Block numbers increase among the full tiles and
    among the partial tiles. The arrays have one extra tile at the end, because the kernels prefetch one tile ahead.
    Rows may share a list.
    """

    start: Tensor  # int32 [P * M]
    full: Tensor  # int32 [P * M]
    count: Tensor  # int32 [P * M]
    index: Tensor  # int32 [(tiles + 1) * G], G = 1 if nothing is gathered
    tile: Tensor  # int32 [tiles + 1]
    words: Tensor  # int32, the concatenated bits of the partial tiles, as in `BlockMask.words`
    tiling: Tiling
    each: int | None = None  # every count, if they are equal and known on the host
    ready: ReadyEvent = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ready = ReadyEvent((self.start, self.full, self.count, self.index, self.tile, self.words))
        object.__setattr__(self, "ready", ready)

    def to(self, device: torch.device) -> TileLists:
        if self.index.device == device:
            return self
        words = self.words.to(device)
        start, full, count, index, tile = to_device(
            (self.start, self.full, self.count, self.index, self.tile), device
        )  # fmt: skip
        return TileLists(start, full, count, index, tile, words, self.tiling, self.each)


@dataclass(frozen=True)
class Worklist:
    """The work of a kernel over rows or columns: its work items, and the lists that they refer to."""

    work: Tensor  # int32 [W, group, ITEM], see work_item.py; other kernels may read other items
    index: Tensor
    tile: Tensor
    words: Tensor
    parts: int = 0  # number of items that are chunks and write partial results
    merged: Tensor | None = None  # int32 [items that are cut, CUT_ITEM]
    ready: ReadyEvent = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A list that is still on the host will be copied, and the copy has the event.
        is_there = self.work.device == self.words.device
        ready = ReadyEvent((self.work, self.index, self.tile, self.words, self.merged) if is_there else ())
        object.__setattr__(self, "ready", ready)

    def to(self, device: torch.device) -> Worklist:
        if self.work.device == device:
            return self
        arrays = [self.work, self.index, self.tile, *([] if self.merged is None else [self.merged])]
        words = [] if self.words.device == device else [self.words]
        work, index, tile, *rest = to_device((*arrays, *words), device)
        moved = rest.pop() if words else self.words
        return replace(self, work=work, index=index, tile=tile, words=moved, merged=rest[0] if rest else None)


def check_number_of_items(batch: int, heads: int, tiles: int) -> None:
    """Raises ValueError if the numbers of the work items do not fit in 32 bits, as the kernels read them."""
    check_count("batch x heads x tiles", batch, heads, tiles, remedy="Split the batch.")


def full_first(indptr: Tensor, index: Tensor, tile: Tensor, words: Tensor, tiling: Tiling) -> TileLists:
    """The lists of compressed sparse rows. Each row keeps its order, but full tiles come before partial tiles.

    Entries past the last row, the unused capacity of a dynamic mask, are not moved.
    """
    if are_on_host(indptr, index, tile):
        return TileLists(*host_plan.full_first(indptr, index, tile), words, tiling)
    partial = tile > 0
    part = torch.add(partial, row_of_entry(indptr, len(index)), alpha=2).clamp_(max=2 * (len(indptr) - 1))
    order = torch.sort(part, stable=True).indices
    full_before = torch.constant_pad_nd((~partial).cumsum(0, dtype=torch.int32), (1, 0))
    full, count = full_before.index_select(0, indptr).diff(), indptr.diff()
    index, tile = [with_trailing_zero(x.index_select(0, order)) for x in (index, tile)]
    return TileLists(indptr[:-1], full, count, index, tile, words, tiling)


def with_trailing_zero(array: Tensor) -> Tensor:
    """The array with a zero appended."""
    return torch.constant_pad_nd(array, (0, 1))

"""The lists of tiles that the kernels walk: one for every row of tiles, or for every column."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.blockmask.csr import row_of_entry
from sparseflash.blockmask.streams import ReadyEvent


@dataclass(frozen=True)
class Lists:
    """The tile list of every row (or column): row r has the tiles `start[r] : start[r] + count[r]`.

    The first `full[r]` of them are full. Tile t lies at block `index[t]`, and `tile[t]` is 0 or the number of its bits
    in `words`. Where tiles are gathered, of G blocks each, their blocks are `index[t * G : (t + 1) * G]`, and what is
    missing from the last tile of a row is a block past the end. Each of the two parts of a list increases. There is one
    tile more than needed, because the kernels read one ahead. Rows may share a list.
    """

    start: Tensor  # int32 [P * M]
    full: Tensor  # int32 [P * M]
    count: Tensor  # int32 [P * M]
    index: Tensor  # int32 [(tiles + 1) * G], G = 1 where nothing is gathered
    tile: Tensor  # int32 [tiles + 1]
    words: Tensor  # int32, the bits of the partial tiles one after the other, as `BlockMask.words`
    tiling: Tiling
    each: int | None = None  # every count, if they are equal and the host knows
    made: ReadyEvent = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        made = ReadyEvent((self.start, self.full, self.count, self.index, self.tile, self.words))
        object.__setattr__(self, "made", made)


def full_first(indptr: Tensor, index: Tensor, tile: Tensor, words: Tensor, tiling: Tiling) -> Lists:
    """The lists of compressed sparse rows, in the order of each row but full tiles before partial ones."""
    rows = row_of_entry(indptr, len(index))
    partial = tile > 0
    _, order = torch.sort(rows * 2 + partial, stable=True)
    partial_before = torch.cat([indptr.new_zeros(1), partial.cumsum(0, dtype=torch.int32)])
    count = indptr.diff()
    full = count - partial_before[indptr.long()].diff()
    return Lists(indptr[:-1], full, count, one_more(index[order]), one_more(tile[order]), words, tiling)


def one_more(array: Tensor) -> Tensor:
    """The array with a zero behind it."""
    return torch.cat([array, array.new_zeros(1)])

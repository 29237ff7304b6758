"""Dynamic masks: arrays that are safe to run but not canonical, which is all that a mask made without waiting can have.

How many tiles a choice on the GPU has kept, and which of them are equal, only the device knows, and asking it stalls
the queue. So a dynamic mask (`BlockMask.dynamic`) is stored in arrays of a size fixed beforehand, and of the rules in
`BlockMask` it keeps those that the kernels need:

- `indptr` starts at 0 and does not decrease; its last number may be less than the entries of `indices` and `tile`. What
  lies past it is room, which belongs to no row.
- `indices` strictly increase in a row; they lie in `0 .. Mk - 1`, `tile` in `0 .. T` and `pattern` in `0 .. P - 1`,
  also in the room.
- Scores past the ends are dead: a tile that an end cuts is partial.

and not these: `bits` may hold equal, dead, full and unused tiles, in any order; patterns may be equal, or unused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseflash.blockmask.build import arrays_of_tiles
from sparseflash.blockmask.csr import stored_tiles
from sparseflash.blockmask.unique import number_by_first_appearance

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask


def canonical_arrays_of(mask: BlockMask) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The canonical `(indptr, indices, tile, bits, pattern)` of a mask; waits for the device."""
    row_blocks = mask.blocks[0]
    rows, cols, tile = stored_tiles(mask)
    # Patterns are numbered as they first appear among the heads, and those that no head uses are left out.
    number, first = number_by_first_appearance(mask.pattern.reshape(-1).long())
    used = mask.pattern.reshape(-1).long()[first]
    renumbered = used.new_full(((len(mask.indptr) - 1) // row_blocks,), -1)
    renumbered[used] = torch.arange(len(used), device=mask.device)
    rows = renumbered[rows // row_blocks] * row_blocks + rows % row_blocks
    kept = rows >= 0
    return arrays_of_tiles(
        mask.q_len, mask.k_len, mask.block_q, mask.block_k,
        rows[kept], cols[kept], tile[kept], mask.bits, number.view(mask.pattern.shape), len(used),
    )  # fmt: skip

"""Dynamic masks: arrays that are safe to run but not canonical, because a canonical form would need a synchronisation.

If blocks are chosen on the GPU, only the device knows how many tiles are kept and which are equal, and asking it stalls
the queue. So a dynamic mask (`BlockMask.dynamic`) has arrays of a size that is fixed in advance. It obeys the rules in
`BlockMask` that the kernels need:

- `indptr` starts at 0 and does not decrease. Its last number may be less than the length of `indices` and `tile`; the
  entries past it are unused capacity and belong to no row.
- `indices` strictly increase within a row and lie in `0 .. Mk - 1`, `tile` lies in `0 .. T` and `pattern` in
  `0 .. P - 1`. The ranges hold for the unused capacity, too.
- Scores past the ends are dead, so a tile that an end cuts is partial.

It need not obey the other rules: `bits` may hold equal, dead, full and unused tiles in any order, and patterns may be
equal or unused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sparseflash.blockmask.build import arrays_of_patterns
from sparseflash.blockmask.patterns import patterns_of_mask

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask


def canonical_arrays_of(mask: BlockMask) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The canonical `(indptr, indices, tile, bits, pattern)` of a mask; synchronises with the device."""
    return arrays_of_patterns(*mask._numbers(), patterns_of_mask(mask), mask.bits, mask.pattern.long())

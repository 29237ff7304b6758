"""The number of patterns and of live tokens of a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask


def pattern_count(mask: BlockMask) -> int:
    """The number of distinct patterns."""
    return (len(mask.indptr) - 1) // mask.blocks[0]


def live_tokens(mask: BlockMask) -> list[tuple[int, int]]:
    """The numbers of live queries and keys of each batch element; synchronises with the device if it has lengths."""
    if mask.lengths is None:
        return [(mask.q_len, mask.k_len)] * mask.shape[0]
    return [(q, k) for q, k in mask.lengths.T.tolist()]

"""Patterns of single heads, taken out of a mask; shared by the other files."""

from __future__ import annotations

from collections.abc import Sequence

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import BLOCKS, Block, block_pair, checked_mask, integer
from sparseflash.blockmask.build import Part
from sparseflash.blockmask.csr import entries_of_pattern


def pattern_of_mask(mask: BlockMask, number: int) -> Part:
    """The tiles of one pattern, ignoring `lengths`: block rows, block columns, tile (all int64), and the words."""
    rows, span = entries_of_pattern(mask.indptr, number, mask.blocks[0])
    return rows, mask.indices[span].long(), mask.tile[span].long(), mask.bits


def one_head(mask: BlockMask, batch: int | None, head: int | None, format: str) -> Part:
    """The tiles of the head selected by `batch` and `head`; of any head, if all have the same pattern.

    `format`: the format that cannot hold several patterns, for the message.
    """
    mask = checked_mask(mask).bake_lengths()
    pattern = mask.pattern
    for name, dim, index in (("batch", 0, batch), ("head", 1, head)):
        if index is not None:
            index, count = integer(index, name, ""), pattern.shape[dim]
            if not (0 <= index < count or (count == 1 and index >= 0)):
                raise ValueError(f"{name} must lie in 0..{count - 1}; got {index}.")
            pattern = pattern.narrow(dim, 0 if count == 1 else index, 1)
    numbers = pattern.unique().tolist()
    if len(numbers) > 1:
        missing = " and ".join(
            f"{name}=" for name, size in (("batch", pattern.shape[0]), ("head", pattern.shape[1])) if size > 1
        )
        raise ValueError(
            f"{format} must hold a single pattern; got a mask with {len(numbers)} for {pattern.shape[0]} x "
            f"{pattern.shape[1]} (batch x heads): select one with {missing}."
        )
    return pattern_of_mask(mask, numbers[0])


def chosen_block(block: Block | None, own: Sequence[int] | None) -> tuple[int, int]:
    """`(block_q, block_k)`: the given block; else the block of the input, if a mask can have it; else 128."""
    if block is None and own is not None and own[0] in BLOCKS and own[1] in BLOCKS:
        return own[0], own[1]
    return block_pair(128 if block is None else block)


def whole_blocks(mask: BlockMask, format: str, remedy: str) -> None:
    """Raises ValueError unless the blocks divide the lengths."""
    if mask.q_len % mask.block_q or mask.k_len % mask.block_k:
        raise ValueError(
            f"{format} must consist of whole blocks; got {mask.q_len} x {mask.k_len} tokens in blocks of "
            f"{mask.block_q} x {mask.block_k}. {remedy}"
        )

"""Stacks masks along heads or along the batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.ops.padding import bake_lengths
from sparseflash.blockmask.ops.reblock import to_one_block
from sparseflash.blockmask.ops.tilelist import mask_of_patterns
from sparseflash.blockmask.patterns import Pattern, patterns_of_mask


def stack_heads(masks: Sequence[BlockMask]) -> BlockMask:
    """The heads of all masks, in order. See `sparseflash.masks.per_head`."""
    masks = _checked(masks)
    batch = _common("batch size", [mask.shape[0] for mask in masks])
    lengths = masks[0].lengths
    if any((mask.lengths is None) != (lengths is None) for mask in masks) or any(
        not torch.equal(mask.lengths.expand(2, batch), lengths.expand(2, batch))
        for mask in masks
        if mask.lengths is not None and lengths is not None
    ):
        masks, lengths = [bake_lengths(mask) for mask in masks], None
    rows = max(mask.pattern.shape[0] for mask in masks)
    return _stacked(masks, [mask.pattern.expand(rows, -1) for mask in masks], 1, lengths, batch)


def stack_batch(masks: Sequence[BlockMask]) -> BlockMask:
    """The batch elements of all masks, in order. See `sparseflash.masks.per_batch`."""
    masks = _checked(masks)
    heads = _common("number of heads", [mask.shape[1] for mask in masks])
    lengths = None
    if any(mask.lengths is not None for mask in masks):
        # A mask without padding has sequences of full length.
        whole = masks[0].pattern.new_tensor([[masks[0].q_len], [masks[0].k_len]])
        lengths = torch.cat(
            [whole.expand(2, mask.shape[0]) if mask.lengths is None else mask.lengths for mask in masks], dim=1
        )
    patterns = [mask.pattern.expand(mask.shape[0], heads) for mask in masks]
    return _stacked(masks, patterns, 0, lengths, sum(mask.shape[0] for mask in masks))


def _checked(masks: Sequence[BlockMask]) -> list[BlockMask]:
    if isinstance(masks, BlockMask):
        raise TypeError("masks must be a list of BlockMasks; got a single one.")
    if not isinstance(masks, Iterable) or getattr(masks, "ndim", 1) == 0:
        raise TypeError(f"masks must be a list of BlockMasks; got {type(masks).__name__}.")
    masks = list(masks)
    if not masks:
        raise ValueError("masks must hold at least one mask; got none.")
    for mask in masks:
        if not isinstance(mask, BlockMask):
            raise TypeError(f"masks must hold BlockMasks; got {type(mask).__name__}.")
        if (mask.q_len, mask.k_len) != (masks[0].q_len, masks[0].k_len):
            raise ValueError(
                f"masks must have the same q_len and k_len to be stacked; got {masks[0].q_len} x {masks[0].k_len} "
                f"and {mask.q_len} x {mask.k_len}. Sequences of different lengths are padded (mask.with_lengths) or "
                "packed (attention_varlen, with a function of the length as the pattern)."
            )
        if mask.device != masks[0].device:
            raise ValueError(f"masks must be on one device to be stacked; got {masks[0].device} and {mask.device}.")
    # A mask object that occurs several times stays one object, so that its tiles are copied once.
    once = {id(mask): mask for mask in masks}
    once = dict(zip(once, to_one_block([mask.canonical() for mask in once.values()]), strict=True))
    return [once[id(mask)] for mask in masks]


def _common(what: str, sizes: list[int]) -> int:
    """The one size other than 1, or 1."""
    different = sorted({size for size in sizes if size != 1})
    if len(different) > 1:
        raise ValueError(f"masks must have the same {what}, or 1, to be stacked; got {', '.join(map(str, sizes))}.")
    return different[0] if different else 1


def _stacked(masks: list[BlockMask], patterns: list[Tensor], dim: int, lengths: Tensor | None, batch: int) -> BlockMask:
    first = masks[0]
    if len(masks) == 1:
        return first
    distinct = {id(mask): mask for mask in masks}
    words, number_of_word = bitmask.deduplicate(torch.cat([mask.bits for mask in distinct.values()]))
    tables = number_of_word.to(torch.int32).add_(1).cpu().split([len(mask.bits) for mask in distinct.values()])
    listed: list[Pattern] = []
    offsets: dict[int, int] = {}
    for mask, table in zip(distinct.values(), tables, strict=True):
        offsets[id(mask)] = len(listed)
        listed += patterns_of_mask(mask, np.concatenate([[0], table.numpy()], dtype=np.int32))
    grid = torch.cat([pattern.long() + offsets[id(mask)] for mask, pattern in zip(masks, patterns, strict=True)], dim)
    return mask_of_patterns(first, listed, words, grid, None if lengths is None else lengths.expand(2, batch))

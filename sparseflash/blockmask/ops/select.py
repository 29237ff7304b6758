"""Some of the batch elements and heads of a mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import integer, known_integers
from sparseflash.blockmask.ops.tilelist import mask_of_patterns
from sparseflash.blockmask.patterns import patterns_of_mask

Choice = int | slice | Sequence[int] | Tensor


def select(mask: BlockMask, batch: Choice | None, heads: Choice | None) -> BlockMask:
    """See `BlockMask.select`."""
    batch_size, head_count = mask.shape[:2]
    elements = _numbers("batch", batch, batch_size, mask.device)
    chosen_heads = _numbers("heads", heads, head_count, mask.device)
    # A dimension of size 1 is shared and stays so.
    pattern, lengths = mask.pattern.long(), mask.lengths
    if elements is not None:
        pattern = pattern[elements] if pattern.shape[0] > 1 else pattern
        lengths = lengths[:, elements] if lengths is not None and lengths.shape[1] > 1 else lengths
    if chosen_heads is not None and pattern.shape[1] > 1:
        pattern = pattern[:, chosen_heads]
    return mask_of_patterns(mask, patterns_of_mask(mask), mask.bits, pattern, lengths)


def _numbers(name: str, given: Choice | None, count: int, device: torch.device) -> Tensor | None:
    """The selected indices, int64. If `count` is 1, the one entry is shared, and any selection gives index 0."""
    if given is None:
        return None
    if isinstance(given, slice):
        if count > 1:
            numbers = torch.arange(count, device=device)[given]
        else:
            numbers = torch.zeros(min(1, len(range(2**31)[given])), dtype=torch.int64, device=device)
    else:
        if not isinstance(given, Sequence) and getattr(given, "ndim", 0) == 0:
            given = [integer(given, name, "")]
        numbers = known_integers(given, name, device).to(device)
        if numbers.ndim != 1:
            raise ValueError(f"{name} must be a number, a slice or a list of numbers; got shape {list(numbers.shape)}.")
    if len(numbers) == 0:
        raise ValueError(f"{name} must choose at least one; got {given!r} of {count}.")
    if int(numbers.min()) < 0 or (count > 1 and int(numbers.max()) >= count):
        last = f"{count - 1}" if count > 1 else "its last"
        raise ValueError(f"{name} must lie in 0..{last}; got {int(numbers.min())}..{int(numbers.max())}.")
    return numbers

"""FlexAttention's lists of blocks of any size, as lists of blocks that a mask can have."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask.arguments import BLOCKS, integer
from sparseflash.interop.lists import Lists
from sparseflash.interop.lookup import MaskMod


def supported(size: int) -> int:
    """The largest block of a mask that is not larger, or the smallest there is.

    >>> [supported(size) for size in (1, 16, 100, 512)]
    [16, 16, 64, 256]
    """
    if integer(size, "BLOCK_SIZE", "tokens") < 1:
        raise ValueError(f"BLOCK_SIZE must be at least 1; got {size}.")
    return max((block for block in BLOCKS if block <= size), default=BLOCKS[0])


def in_supported_blocks(
    partial: Lists, full: Lists | None, lengths: tuple[int, int], size: tuple[int, int], mask_mod: MaskMod | None
) -> tuple[tuple[int, int], Lists, Lists, MaskMod]:
    """`(block, partial, full, rule)` with the same live scores as lists of blocks of `size` tokens and `mask_mod`.

    >>> counts, indices = torch.tensor([[[1, 2]]]), torch.tensor([[[[0, 0], [0, 1]]]])  # causal in blocks of 512
    >>> found = in_supported_blocks((counts, indices), None, (1024, 1024), (512, 512), lambda b, h, q, k: k <= q)
    >>> found[0], found[1][0].tolist()
    ((256, 256), [[[2, 2, 4, 4]]])

    A new block is full if all that it touches are, and else partial if it touches any that is listed.
    """
    block = supported(size[0]), supported(size[1])
    old = tuple(-(-n // own) for n, own in zip(lengths, size))
    is_full = _layout(full, old) if full is not None else torch.zeros_like(_layout(partial, old))
    is_partial = _layout(partial, old)
    rows, columns = (_touched(n, own, new, partial[0].device) for n, own, new in zip(lengths, size, block))
    every = [is_full[:, :, i][:, :, :, j] for i in rows for j in columns]
    some = [(is_full | is_partial)[:, :, i][:, :, :, j] for i in rows for j in columns]
    whole = torch.stack(every).all(0)
    rest = torch.stack(some).any(0) & ~whole

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        i, j = q // size[0], k // size[1]
        if mask_mod is None:
            return is_full[b, h, i, j]
        return is_full[b, h, i, j] | (is_partial[b, h, i, j] & mask_mod(b, h, q, k))

    return block, _lists(rest), _lists(whole), rule


def _layout(lists: Lists, blocks: tuple[int, ...]) -> Tensor:
    """Bool `[B, H, Mq, Mk]`: the blocks that are listed."""
    counts, indices = lists
    listed = torch.arange(indices.shape[-1], device=counts.device) < counts.unsqueeze(-1)
    number = torch.where(listed, indices.long(), blocks[1])  # what is not listed goes to a column past the last
    found = torch.zeros(*counts.shape, blocks[1] + 1, dtype=torch.bool, device=counts.device)
    return found.scatter_(-1, number, True)[:, :, : blocks[0], : blocks[1]]


def _touched(length: int, old: int, new: int, device: torch.device) -> list[Tensor]:
    start = torch.arange(0, length, new, device=device)
    first, last = start // old, ((start + new).clamp(max=length) - 1) // old
    return [torch.minimum(first + step, last) for step in range(-(-new // old) + 1)]


def _lists(layout: Tensor) -> Lists:
    order = layout.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return layout.sum(-1), order

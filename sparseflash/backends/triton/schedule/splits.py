"""Which work items are cut into chunks, and the items that come of it.

An item far longer than the rest (the row of a global token, or the column) would still run when all others are done.
Its list is cut into chunks of nearly equal length, each an item of its own that writes partial results to a workspace;
`portable/combine.py` merges them in the order of the list.

What is cut depends on the rows of one (batch element, head) alone, never on how many of those there are: a row has the
same bits alone and in any batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.triton.configs import SplitRule


class Items(NamedTuple):
    """Work items, all int32 `[W, group]`: each has one list of tiles for every query head of a group."""

    number: Tensor  # of batch and head and tile of tokens; the same for the group
    start: Tensor
    full: Tensor  # so many of the list are full tiles, which come first
    size: Tensor  # of the list
    part: Tensor  # which of the chunks of items that are cut, from 1; 0: not cut; the same for the group


class Cuts(NamedTuple):
    """Into how many chunks each item is cut; and, on the host, what that comes to."""

    chunks: Tensor  # int64 [W], 1: not cut
    total: int  # of them
    cut: int  # items cut into more than one


def cuts_of(
    size: Tensor, tiles: int, block: int, held: int, resident: int, rule: SplitRule, *, most: int, total: int | None,
    each: int | None, countable: bool,
) -> Cuts | None:  # fmt: skip
    """How items with lists of these `size [W, group]`, in tiles of `block` tokens, are cut; None: no item is.

    tiles: how many items in a row are those of one head. held: tokens of the tile that the program of an item holds.
    resident: how many programs a multiprocessor runs at a time.

    Needs numbers on the host: `each`, the tiles of every item, if it is known there; else, if `countable`, one copy of
    two numbers from the device, saved where `most`, which none exceeds, and `total`, the tiles of a head if that is
    known, already say that nothing is cut.
    """
    slots = rule.multiprocessors * resident // rule.heads
    shortest = -(-rule.shortest(held) // block)
    if most <= rule.worth * max(shortest, 0 if total is None else total // slots):
        return None
    if each is not None:
        items = len(size)
        pieces = int(_chunks(torch.full((1, tiles), each, device="cpu"), slots, shortest, rule)[0, 0])
        if pieces == 1:
            return None
        return Cuts(torch.full((items,), pieces, device=size.device), pieces * items, items)
    if not countable:
        return None
    chunks = _chunks(size.sum(1).view(-1, tiles), slots, shortest, rule).view(-1)
    total, cut = torch.stack([chunks.sum(), (chunks > 1).sum()]).tolist()
    return Cuts(chunks, total, cut) if cut else None


def _chunks(lengths: Tensor, slots: int, shortest: int, rule: SplitRule) -> Tensor:
    """Into how many: int64 `[heads, tiles]`. As no chunk is below the mean, a head has at most `slots` more items."""
    total, longest = lengths.sum(1, keepdim=True), lengths.amax(1, keepdim=True)
    chunk = (-(-total // slots)).clamp(min=shortest)
    is_far = longest * lengths.shape[1] > rule.far * total
    worth = torch.where(is_far, longest > rule.worth * chunk, longest > rule.worth_alike * chunk)
    return torch.where(worth & (lengths > chunk), -(-lengths // chunk), 1)


def cut_items(items: Items, cuts: Cuts) -> tuple[Items, Tensor]:
    """The chunks of all items, in their order, and what is to be merged.

    Chunk p of n is the part from `p * length // n` to `(p + 1) * length // n` of the lists of an item one after the
    other, full tiles first in each. So it is a list again, or none, for each of the group.

    The second is int32 `[cut, 4]`: the number of an item that is cut, the place of its first chunk, from 0, how many
    there are, and a filler.
    """
    device = cuts.chunks.device
    item = torch.repeat_interleave(torch.arange(len(cuts.chunks), device=device), cuts.chunks, output_size=cuts.total)
    chunk = torch.arange(cuts.total, device=device) - (cuts.chunks.cumsum(0) - cuts.chunks)[item]
    pieces = cuts.chunks[item]
    number, start, full, size, _ = (x[item] for x in items)
    length, stop = size.sum(1), size.cumsum(1)
    low, high = (
        ((p * length // pieces).unsqueeze(1) - (stop - size)).clamp(min=0).minimum(size) for p in (chunk, chunk + 1)
    )
    is_cut = cuts.chunks > 1
    is_part = is_cut[item]
    made = Items(
        number,
        (start + low).to(torch.int32),
        (full - low).clamp(min=0).minimum(high - low).to(torch.int32),
        (high - low).to(torch.int32),
        (is_part.cumsum(0) * is_part).to(torch.int32).unsqueeze(1).expand_as(number),
    )
    parts = cuts.chunks * is_cut
    _, order = torch.sort(is_cut, stable=True, descending=True)
    merged = torch.stack([items.number[:, 0], parts.cumsum(0) - parts, parts, torch.zeros_like(parts)], dim=-1)
    return made, merged[order[: cuts.cut]].to(torch.int32)

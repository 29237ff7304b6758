"""Which work items are cut into chunks, and the items that come of it.

An item far longer than the rest (the row of a global token, or the column) would still run when all others are done.
Its list is cut into chunks of nearly equal length, each an item of its own that writes partial results to a workspace;
`combine.py` merges them in the order of the list. What is cut depends on the mask and the shapes alone, so the same
call gives the same bits at every run; it does depend on batch size and heads, which say what else there is
to do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rule(NamedTuple):
    """When cutting is worth it; lengths are those of items, in tiles of the mask.

    Programs start longest first, so with `mean = sum of lengths / slots` the last one ends at about
    `max(mean, longest)`, and what cutting can win is `longest / mean`. Slots are the programs that run at a time, by
    `configs.resident_programs`. Simulated for 16384 tokens, tiles walked by the busiest slot before and after:

        2 global rows and columns, window 3, 3 random    slots   longest   mean
        blocks of 128, D = 128, 16 heads, forward          264       128     75    128 -> 78
                                          dK/dV            264       128    150    not cut (156)
                       D = 64, 32 heads, forward           396       128    201    not cut (204)
                       D = 128, 1 head, forward            264       128      4    128 -> 16
        blocks of 64, D = 64, 32 heads, forward            528       256    153    256 -> 158
        blocks of 16, D = 64, 32 heads, forward           2112      1024    154    1024 -> 160
        causal, dense: D = 128, 16 heads, forward          264       128    500 and more: not cut

    On an H100 a score of the two that are not cut took as long as under a butterfly, or 4 % longer; while they were not
    cut, that in blocks of 64 took 1.35 times as long, and that in blocks of 16 four times.

    A chunk costs about half a tile, to write and read its part, and the merge is one more kernel of a few
    microseconds, two tiles or so. So no chunk is shorter than 16 tiles.

    Where lists are alike (dense, causal) and merely fewer than there are slots, the model promises more than there is
    to win: a program that has a multiprocessor to itself runs faster than one of two. There most of the slots must be
    idle before anything is cut, as they are in attention of a few queries to very many keys.
    """

    # Of an H100; a constant, so that bits do not depend on the GPU beyond the configuration that it takes.
    multiprocessors: int = 132
    fewest: int = 2048  # tokens a chunk, or
    fewest_tiles: int = 16  # of as many tokens as a program holds, if that is less
    far: float = 4.0  # times the mean item is what counts as far longer than the rest
    worth: float = 1.5  # times the chunk must the longest item be, if it is far longer than the rest,
    worth_alike: float = 4.0  # or else

    def shortest(self, held: int) -> int:
        """Tokens of the shortest chunk."""
        return min(self.fewest, self.fewest_tiles * held)


RULE = Rule()
NEVER = Rule(fewest=1 << 40, fewest_tiles=1 << 40)  # nothing is cut


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
    size: Tensor,
    block: int,
    held: int,
    resident: int,
    *,
    most: int,
    total: int | None,
    each: int | None,
    countable: bool,
) -> Cuts | None:
    """How items with lists of these `size [W, group]`, in tiles of `block` tokens, are cut; None: no item is.

    held: tokens of the tile that the program of an item holds; resident: how many programs a multiprocessor runs at a
    time.

    Needs numbers on the host: `each`, the tiles of every item, if it is known there; else, if `countable`, one copy
    of two numbers from the device, saved where `most`, which none exceeds, and `total`, if it is known, already say
    that nothing is cut.
    """
    slots, shortest = RULE.multiprocessors * resident, -(-RULE.shortest(held) // block)
    if most <= RULE.worth * max(shortest, 0 if total is None else total // slots):
        return None
    if each is not None:
        items = len(size)
        pieces = int(_chunks(torch.full((items,), each, device="cpu"), slots, shortest)[0])
        if pieces == 1:
            return None
        return Cuts(torch.full((items,), pieces, device=size.device), pieces * items, items)
    if not countable:
        return None
    chunks = _chunks(size.sum(1), slots, shortest)
    total, cut = torch.stack([chunks.sum(), (chunks > 1).sum()]).tolist()
    return Cuts(chunks, total, cut) if cut else None


def _chunks(lengths: Tensor, slots: int, shortest: int) -> Tensor:
    """The rule: int64 [W]. With chunks of at least the mean there are at most `slots` more items than before."""
    total, longest = lengths.sum(), lengths.max()
    chunk = (-(-total // slots)).clamp(min=shortest)
    is_far = longest * len(lengths) > RULE.far * total
    worth = torch.where(is_far, longest > RULE.worth * chunk, longest > RULE.worth_alike * chunk)
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

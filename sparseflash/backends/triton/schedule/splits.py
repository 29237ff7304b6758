"""Split-K: decides which work items are cut into chunks, and makes the resulting items.

An item far longer than the rest (the row or column of a global token) would still be running when all others are done.
Its list is cut into nearly equal chunks; each is an item that writes partial results, which
`device_functions/combine.py` merges in the order of the list.

The cuts of a row depend only on the rows of the same (batch element, head), so a row has the same bits in every batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.triton.schedule.work_item import CutItem


class SplitRule(NamedTuple):
    """When items are cut into chunks.

    The constants were measured on an H100, and are used on all GPUs.

    Programs start longest first, so with `mean = sum of lengths / slots` the last ends at about `max(mean, longest)`,
    and cutting saves at most a factor of `longest / mean`. Slots are the programs that run at a time, by
    `resident_programs`. A row's bits must not depend on the number of heads and batch elements, so a constant number of
    `heads` is assumed to share the slots.

    A chunk costs about half a tile, for its partial result; the merge about two tiles. So no chunk is shorter than 16
    tiles.

    If all lists have similar lengths and are only too few for all slots, cutting saves less, because a program that has
    an SM to itself runs faster than one of two. Then items are cut only if most slots would be idle, as with few
    queries and very many keys.

    Examples with 16,384 tokens: the number of chunks of the longest row, and the cost of the chunks of all rows, at
    most, as a share of the work

        2 global rows and columns, window 3, 3 random, blocks of 128, D = 128    4 chunks   0.3 %
                                                       blocks of 64, D = 64      7 chunks   0.3 %
        causal, dense                                                            not cut
        1,024 queries that see 65,536 keys, D = 128                              5 chunks   0.5 %
        1 query that sees 65,536 keys, D = 64                                   64 chunks   6.2 %
    """

    multiprocessors: int = 132  # of an H100; a constant, so that results on all GPUs depend only on the tile sizes
    heads: int = 8
    fewest: int = 2048  # the minimum of tokens per chunk, or
    fewest_tiles: int = 16  # this many times the tokens that a program holds, if that is less
    far: float = 4.0  # an item longer than this many times the mean is an outlier
    worth: float = 1.5  # items are cut only if the longest has this many times the length of a chunk and is an outlier,
    worth_alike: float = 4.0  # or else this many times

    def shortest(self, held: int) -> int:
        return min(self.fewest, self.fewest_tiles * held)

    def longest_whole(self, held: int) -> float:
        """The length in tokens of the longest items that are never cut if all have similar lengths."""
        return self.worth_alike * self.shortest(held)


SPLITS = SplitRule()


class Items(NamedTuple):
    """Work items, all int32 `[W, group]`: each has one list of tiles for every query head of a group."""

    number: Tensor  # of batch, head and tile of tokens; the same for the group
    start: Tensor
    full: Tensor  # number of full tiles of the list; these come first
    size: Tensor  # number of tiles of the list
    part: Tensor  # number among all chunks of cut items, from 1; 0: not cut; the same for the group


class Cuts(NamedTuple):
    """The number of chunks of each item, and totals on the host."""

    chunks: Tensor  # int64 [W]; 1: not cut
    total: int  # sum of `chunks`
    cut: int  # number of items that are cut

    @property
    def parts(self) -> int:
        return self.total - (len(self.chunks) - self.cut)


def may_be_cut(
    block: int, held: int, resident: int, rule: SplitRule, *, most: int, total: int | None
) -> bool:  # fmt: skip
    """Whether some item may be cut; otherwise `cuts_of` cuts none. most: an upper bound of all sizes. total: tiles of a
    head, if known.
    """
    shortest = -(-rule.shortest(held) // block)
    if total is not None:
        shortest = max(shortest, total // (rule.multiprocessors * resident // rule.heads))
    return most > rule.worth * shortest


def cuts_of(
    size: Tensor, tiles: int, block: int, held: int, resident: int, rule: SplitRule, *, each: int | None,
    may_wait: bool,
) -> Cuts | None:  # fmt: skip
    """How items with lists of these `size [W, group]`, in tiles of `block` tokens, are cut; None if no item is.

    tiles: the consecutive items of one head. held: the tokens that the program of an item holds. resident: programs per
    SM at a time. each: the number of tiles of every item, if the same for all and known on the host.

    The result needs totals on the host: from `each`, or copied from the device if `may_wait`; else no item is cut.
    """
    slots = rule.multiprocessors * resident // rule.heads
    shortest = -(-rule.shortest(held) // block)
    if each is not None:
        items = len(size)
        pieces = int(_chunks(torch.full((1, tiles), each, device="cpu"), slots, shortest, rule)[0, 0])
        if pieces == 1:
            return None
        return Cuts(torch.full((items,), pieces, device=size.device), pieces * items, items)
    if not may_wait:
        return None
    chunks = _chunks(size.sum(1).view(-1, tiles), slots, shortest, rule).view(-1)
    total, cut = torch.stack([chunks.sum(), (chunks > 1).sum()]).tolist()
    return Cuts(chunks, total, cut) if cut else None


def _chunks(lengths: Tensor, slots: int, shortest: int, rule: SplitRule) -> Tensor:
    """The number of chunks, int64 `[heads, tiles]`.

    No chunk is shorter than the work per slot, so a head gets at most `slots` more items.
    """
    total, longest = lengths.sum(1, keepdim=True), lengths.amax(1, keepdim=True)
    chunk = (-(-total // slots)).clamp(min=shortest)
    is_far = longest * lengths.shape[1] > rule.far * total
    worth = torch.where(is_far, longest > rule.worth * chunk, longest > rule.worth_alike * chunk)
    return torch.where(worth & (lengths > chunk), -(-lengths // chunk), 1)


def cut_items(items: Items, cuts: Cuts) -> tuple[Items, Tensor]:
    """The chunks of all items, in order, and the items to be merged.

    The lists of an item are cut as if concatenated: chunk p of n goes from `p * length // n` to `(p + 1) * length //
    n`. Full tiles come first in each list, so a chunk is again a list, maybe empty, for each member of the group.

    The second result is int32 `[cut, CUT_ITEM]`.
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
    merged = CutItem(items.number[:, 0], parts.cumsum(0) - parts, parts, torch.zeros_like(parts))
    return made, torch.stack(merged, dim=-1)[order[: cuts.cut]].to(torch.int32)

"""The work plan of the Hopper backward: the items of every program and their order, and the order of all additions.

An item is a tile of keys of one KV head, with an entry for every live tile of queries of every query head of its group.
An item that is far too long is cut into parts, items from then on (`cuts.py`). The plan is made before the kernel runs,
in three steps:

1. Items go to programs, longest first where they are long, otherwise head by head, each to a program with little work.
2. Every place in a program's list has a time: the number of entries before it, with each item counting as one more. The
   entries of an item are put in an order in which few of them meet other programs' entries at one tile of queries at
   the same time.
3. The additions to a tile of queries are ordered by time, and at the same time by the number of the program. A tile
   with more additions than others has several chains, which take them in turn.

For a dynamic mask the plan is made without waiting for the device. It has room for the most entries and chains, cuts no
item, has one chain a tile, and walks all columns in the first order.

The kernel cannot deadlock as long as times increase along every program (`backward.py`); how long additions wait
depends on how realistic the times are.

`fused_plan.py` makes the plan with kernels. The same steps in PyTorch, their reference, are in
tests/backends/triton/hopper/reference_plan.py. Without a GPU, where `explain` asks for no more, step 1 is all that is
done: `items_alone`.

The order of additions, and so the last bits of dq, depends on the mask, the numbers of programs and heads and, where
there are lengths, on these (`within_lengths.py`) alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from sparseflash.backends.triton.persistent import cuts
from sparseflash.backends.triton.persistent.plan import start_order
from sparseflash.backends.triton.schedule.work_item import CUT_ITEM, place
from sparseflash.backends.triton.schedule.worklists import TileLists
from sparseflash.blockmask.streams import ReadyEvent
from sparseflash.limits import COUNT

Ints = NDArray[np.int64]

# A tile of queries has one chain for every _SHORTEST_CHAIN additions, or for every _LONG_CHAIN / 4 times its head's
# mean if that is more. In a simulation of 16,384 tokens, causal masks then take 1.02 times as long as without any
# order, and 1.20 times with one chain a tile; random blocks 1.12 and 1.13.
#
# Few queries of many keys are few tiles, each with very many additions, to which all programs add at a time. Where a
# head has more than _FEW times as many additions to a tile as live tiles, its number of chains follows from the number
# of additions that a program makes. In a simulation of 1,024 queries and 65,536 keys one chain a tile takes 5.3 times
# as long as without any order, and about as long as measured on an H200; 17 chains a tile take 1.02 times as long.
_SHORTEST_CHAIN = 16
_LONG_CHAIN = 5  # quarters
_FEW = 4
ONE_CHAIN = 2**31 - 1  # more additions than a tile can have
# Rows are walked in bands of _BAND rows, with a stride of this share of a band. A later order replaces an earlier one
# if it has fewer than _CLEARLY tenths of its meetings.
_STRIDE = 0.382
_BAND = 128
_CLEARLY = 7  # tenths


# The shortest item that may be taken before all others, in percent of a program's mean load. Selected blocks have
# many items longer than twice the mean; if these came first, from all heads, no head's tiles would stay in the L2
# cache.
LEAST = 25

# A round gives an item to every program whose load exceeds the least load by at most HALVES_APART halves of the mean
# cost of an item; in the last LAST_ROUNDS rounds, by at most one half. On 132 programs, 2,048 items of selected blocks
# took 20 rounds with three halves and 30 with one half in all rounds, and the last program ended as early.
HALVES_APART = tl.constexpr(3)
LAST_ROUNDS = tl.constexpr(3)


class BackwardItem(NamedTuple):
    """The numbers of an item, in the order in which they are stored."""

    number: Any  # of batch element and KV head
    first_key: Any
    first_entry: Any
    count: Any  # of its entries
    part: Any  # number among all parts of items that are cut, from 1; 0: not cut


class Entry(NamedTuple):
    """The numbers of an entry of an item."""

    row: Any  # number of batch, query head and tile of queries
    tile: Any  # the number of that tile's bits; 0: full
    chain: Any
    rank: Any  # in the chain


# Kernels index the numbers of all entries with 32 bits.
MOST_ENTRIES_LISTED = COUNT // len(Entry._fields) - 1

ITEM = tl.constexpr(len(BackwardItem._fields))
ITEM_NUMBER = place(BackwardItem, "number")
ITEM_FIRST_KEY = place(BackwardItem, "first_key")
ITEM_FIRST_ENTRY = place(BackwardItem, "first_entry")
ITEM_COUNT = place(BackwardItem, "count")
ITEM_PART = place(BackwardItem, "part")
ENTRY = tl.constexpr(len(Entry._fields))
ENTRY_ROW = place(Entry, "row")
ENTRY_TILE = place(Entry, "tile")
ENTRY_CHAIN = place(Entry, "chain")
ENTRY_RANK = place(Entry, "rank")


@dataclass(frozen=True)
class BackwardPlan:
    """The lists of all programs, and the chains of all tiles of queries."""

    start: Tensor  # int32 [programs + 1], the first item of each program
    work: Tensor  # int32 [W, ITEM]
    entries: Tensor  # int32 [E, ENTRY], some perhaps unused
    # int32 [B * Hq * tiles + 1], the first addition to each tile of queries, if the additions to all tiles were listed
    # tile by tile; and the first chain of each.
    made: Tensor
    chain: Tensor
    words: Tensor  # int32 [T, 128 * 4], the bits of the partial tiles, with keys as rows
    chains: int  # at least the number of chains
    merged: Tensor  # int32 [items that are cut, CUT_ITEM]
    parts: int  # of all cut items
    ready: ReadyEvent = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ready = ReadyEvent((self.start, self.work, self.entries, self.made, self.chain, self.words, self.merged))
        object.__setattr__(self, "ready", ready)

    @property
    def programs(self) -> int:
        return len(self.start) - 1

    def walked(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arrays that the kernel over keys reads: `start`, `work`, `entries` and `words`."""
        # Without a live tile the entries are empty, and an empty tensor has no address. The kernel does not read the
        # tensor in their place.
        entries = self.entries if len(self.entries) else torch.empty_like(self.work[:1])
        return self.start, self.work, entries, self.words


def items_alone(
    lists: TileLists, pattern: Tensor, kv_heads: int, k_len: int, *, programs: int, may_wait: bool = True
) -> BackwardPlan:
    """The plan for `pattern [B, Hq]` without entries, chains and bits: the number of entries of every item, and the
    items of every program. For a CPU.

    lists: over columns. may_wait: False for a dynamic mask.
    """
    columns, rule = -(-k_len // lists.tiling.held), cuts.RULE if may_wait else cuts.NEVER
    group = pattern.shape[1] // kv_heads
    list_of = pattern.long().view(-1, 1, group) * columns + torch.arange(columns).unsqueeze(1)
    size = lists.count.long()[list_of].sum(2).view(-1)
    count = cuts.parts_of(size, programs, rule)
    item = torch.repeat_interleave(count)
    part = torch.arange(len(item)) - (count.cumsum(0) - count)[item]
    size = (part + 1) * size[item] // count[item] - part * size[item] // count[item]
    program, order = assigned(size.numpy(), programs)
    work = torch.zeros(len(size), ITEM.value, dtype=torch.int32)
    work[:, ITEM_COUNT.value] = size[torch.from_numpy(order[np.argsort(program[order], kind="stable")])]
    # A dynamic mask has all programs, some perhaps without an item.
    items = np.bincount(program, minlength=0 if may_wait else programs)
    start = torch.from_numpy(np.append(0, np.cumsum(items))).int()
    nothing = work.new_empty(0)
    is_cut = count > 1
    merged = work.new_zeros(int(is_cut.sum()), CUT_ITEM.value)
    return BackwardPlan(
        start, work, nothing.view(0, ENTRY.value), start[:1], start[:1], nothing, 0, merged, int(count[is_cut].sum())
    )


def check_entries(lists: TileLists, pattern: Tensor, q_len: int, k_len: int) -> None:
    """Raises ValueError if `pattern [B, Hq]` has more than `MOST_ENTRIES_LISTED` entries.

    Synchronises with the device only if the sizes allow more.
    """
    tiles = math.prod(-(-n // size) for n, size in zip((k_len, q_len), lists.tiling[:2]))
    most = tiles if lists.each is not None else min(tiles, len(lists.tile) - 1)  # equal rows share a list
    if pattern.numel() * most <= MOST_ENTRIES_LISTED:
        return
    columns = -(-k_len // lists.tiling.held)
    entries = int(lists.count.view(-1, columns).sum(1)[pattern.long()].sum())
    if entries > MOST_ENTRIES_LISTED:
        raise ValueError(
            f"the live tiles of all heads must be at most {MOST_ENTRIES_LISTED:,} for the backward of the Hopper "
            f"kernels; got {entries:,}. Split the batch or the heads, or pass backend='triton'."
        )


def assigned(sizes: Ints, programs: int) -> tuple[Ints, Ints]:
    """The program of every item of these `sizes`, and the order in which items were assigned.

    Items are taken in `start_order`, a round at a time. A round has an item for each program whose load is near the
    least (`HALVES_APART`); the longest of these items goes to the program with the least load. Every program has an
    item if there are enough.

    >>> program, order = assigned(np.array([3, 1, 9, 2, 1, 3]), programs=2)
    >>> order.tolist(), [int(sizes.sum()) for sizes in (np.array([3, 1, 9, 2, 1, 3])[program == p] for p in (0, 1))]
    ([2, 0, 5, 3, 1, 4], [10, 9])
    """
    order = start_order(torch.from_numpy(sizes), programs, least=LEAST).numpy()
    cost = sizes + 1
    load, program = np.zeros(min(programs, len(sizes)), dtype=np.int64), np.empty(len(sizes), dtype=np.int64)
    at = 0
    while at < len(order):
        halves = HALVES_APART.value if len(order) - at > LAST_ROUNDS.value * programs else 1
        free = np.flatnonzero((load - load.min()) * 2 * len(order) <= halves * cost.sum())
        some = order[at : at + len(free)]
        some = some[np.argsort(-cost[some], kind="stable")]
        free = free[np.argsort(load[free], kind="stable")][: len(some)]
        program[some] = free
        load[free] += cost[some]
        at += len(some)
    return program, order


def band_of(rows: int) -> int:
    """How many of the `rows` tiles of queries of a head a program walks before it goes on to the others."""
    return rows if rows <= 2 * _BAND else _BAND


def stride_of(band: int) -> int:
    """The stride in which the rows of a band are walked: near _STRIDE of the band, and coprime to it.

    >>> stride_of(128)
    49
    """
    return next(each for each in range(max(int(_STRIDE * band), 1), band + 2) if math.gcd(each, band) == 1)

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

On a GPU `fused_plan.py` makes the same plan with kernels.

The order of additions, and so the last bits of dq, depends on the mask and the numbers of programs and heads alone.
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
from sparseflash.backends.triton.schedule.work_item import CUT_PARTS, place
from sparseflash.backends.triton.schedule.worklists import TileLists
from sparseflash.blockmask.bitmask import transposed, words_per_row
from sparseflash.blockmask.streams import ReadyEvent
from sparseflash.blockmask.transfer import to_device
from sparseflash.limits import COUNT

Ints = NDArray[np.int64]

# A tile of queries has one chain for every _SHORTEST_CHAIN additions, or for every _LONG_CHAIN / 4 times its head's
# mean if that is more. In a simulation of 16,384 tokens, causal masks then take 1.02 times as long as without any
# order, and 1.20 times with one chain a tile; random blocks 1.12 and 1.13.
_SHORTEST_CHAIN = 16
_LONG_CHAIN = 5  # quarters
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
    chain: Tensor  # int32 [B * Hq * tiles + 1], the first chain of each tile of queries
    words: Tensor  # int32 [T, 128 * 4], the bits of the partial tiles, with keys as rows
    chains: int  # at least the number of chains
    merged: Tensor  # int32 [items that are cut, CUT_ITEM]
    parts: int  # of all cut items
    ready: ReadyEvent = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ready = ReadyEvent((self.start, self.work, self.entries, self.chain, self.words, self.merged))
        object.__setattr__(self, "ready", ready)

    @property
    def programs(self) -> int:
        return len(self.start) - 1


def backward_plan(
    lists: TileLists, pattern: Tensor, kv_heads: int, q_len: int, k_len: int, *, programs: int, may_wait: bool = True
) -> BackwardPlan:
    """The plan for `pattern [B, Hq]`, on its device.

    lists: over columns. may_wait: False for a dynamic mask. (This implementation waits for the device in any case.)
    """
    device, (batch, heads) = pattern.device, pattern.shape
    check_entries(lists, pattern, q_len, k_len)
    group = heads // kv_heads
    rows, columns = -(-q_len // lists.tiling.streamed), -(-k_len // lists.tiling.held)
    column = torch.arange(columns, device=device)
    list_of = (pattern.long().view(-1, 1, group) * columns + column.unsqueeze(1)).view(-1, group)
    counts, index = lists.count.long(), lists.index.long()
    walked, walk_start = walks(lists.start.long(), counts, index, rows, columns)
    parts, merged = cuts.cut(walk_start[list_of], counts[list_of], programs, cuts.RULE if may_wait else cuts.NEVER)
    items = _dealt(parts.size.sum(1).cpu().numpy(), programs)
    if not may_wait:  # all programs, some perhaps without an item
        items = items._replace(start=np.pad(items.start, (0, programs + 1 - len(items.start)), mode="edge"))
    arrays = [torch.from_numpy(x).int() for x in items]
    *of_items, start = to_device(arrays, device)
    sequence, size, first, program, time = (x.long() for x in of_items)
    number, walk_start, lengths = (x[sequence] for x in (parts.number[:, 0], parts.start, parts.size))
    total = int(items.size.sum())

    item, place = _expanded(size, total)
    time, program = time[item] + place, program[item]
    of_list, place = _expanded(lengths.view(-1).long(), total)
    kv_head = number[of_list // group] // columns
    head = kv_head // kv_heads * heads + kv_head % kv_heads * group + of_list % group
    at = walk_start.view(-1)[of_list] + place
    source = best_of(walked[:, at], index, head, time, rows, batch * heads) if may_wait else walked[0, at]
    row = head * rows + index[source]
    tiles = batch * heads * rows
    chain, rank, chains = chained(
        row, time, program, rows, tiles, items.programs, _SHORTEST_CHAIN if may_wait else ONE_CHAIN
    )

    first_key = number % columns * lists.tiling.held
    work = torch.stack(BackwardItem(number // columns, first_key, first, size, parts.part[sequence, 0]), dim=1)
    entries = torch.stack(Entry(row, lists.tile[source], chain, rank), dim=1)
    parts_cut = int(merged[:, CUT_PARTS.value].sum())
    most = int(chains[-1]) if may_wait else tiles
    return BackwardPlan(start, work.int(), entries.int(), chains.int(), bits_by_key(lists), most, merged, parts_cut)


def check_entries(lists: TileLists, pattern: Tensor, q_len: int, k_len: int) -> None:
    """Raises ValueError if `pattern [B, Hq]` has more than `MOST_ENTRIES_LISTED` entries.

    Synchronises with the device only if the sizes allow more.
    """
    tiles = math.prod(-(-n // size) for n, size in zip((k_len, q_len), lists.tiling[:2]))
    most = tiles if lists.each is not None else min(tiles, len(lists.tile) - 1)
    if pattern.numel() * most <= MOST_ENTRIES_LISTED:
        return
    columns = -(-k_len // lists.tiling.held)
    entries = int(lists.count.view(-1, columns).sum(1)[pattern.long()].sum())
    if entries > MOST_ENTRIES_LISTED:
        raise ValueError(
            f"the live tiles of all heads must be at most {MOST_ENTRIES_LISTED:,} for the backward of the Hopper "
            f"kernels; got {entries:,}. Split the batch or the heads, or pass backend='triton'."
        )


class _Items(NamedTuple):
    """Items, sorted by program: the number, size, first entry, program and start time of each; and the first item of
    every program, [programs + 1].
    """

    sequence: Ints
    size: Ints
    first: Ints
    program: Ints
    time: Ints
    start: Ints

    @property
    def programs(self) -> int:
        return len(self.start) - 1


def _dealt(sizes: Ints, programs: int) -> _Items:
    program, order = assigned(sizes, programs)
    sequence = order[np.argsort(program[order], kind="stable")]
    program, sizes = program[sequence], sizes[sequence]
    first, start = np.cumsum(sizes) - sizes, np.append(0, np.cumsum(np.bincount(program)))
    time = first - first[start[:-1]][program] + np.arange(len(sequence)) - start[program]
    return _Items(sequence, sizes, first, program, time, start)


def assigned(sizes: Ints, programs: int) -> tuple[Ints, Ints]:
    """The program of every item of these `sizes`, and the order in which items were assigned.

    Items are taken in `start_order`, a round at a time. A round has an item for each program whose load is about the
    least; the longest of these items goes to the program with the least load. Every program has an item if there are
    enough.

    >>> program, order = assigned(np.array([3, 1, 9, 2, 1, 3]), programs=2)
    >>> order.tolist(), [int(sizes.sum()) for sizes in (np.array([3, 1, 9, 2, 1, 3])[program == p] for p in (0, 1))]
    ([2, 0, 5, 3, 1, 4], [10, 9])
    """
    order = start_order(torch.from_numpy(sizes), programs, least=LEAST).numpy()
    cost = sizes + 1
    near = float(cost.mean()) / 2
    load, program = np.zeros(min(programs, len(sizes))), np.empty(len(sizes), dtype=np.int64)
    at = 0
    while at < len(order):
        free = np.flatnonzero(load <= load.min() + near)
        some = order[at : at + len(free)]
        some = some[np.argsort(-cost[some], kind="stable")]
        free = free[np.argsort(load[free], kind="stable")][: len(some)]
        program[some] = free
        load[free] += cost[some]
        at += len(some)
    return program, order


def walks(start: Tensor, count: Tensor, index: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Orders in which the lists of columns may be walked, each as places in `index`; and where each list begins.

    Two columns meet where both reach the same row at the same time. In the first three orders, columns that start
    together and have all rows never meet:

    - From the diagonal on, wrapping around at the end, in bands of rows and in strides within a band. Meetings are
      spread over time, and the rows that all programs read and add to at one time fit in the L2 cache.
    - From the diagonal on, wrapping around at the end. Columns that have all rows from some row on never meet, either.
    - By `row ^ column`. Columns of a butterfly never meet, either.
    - From the last row back. Columns of a causal mask that start one after the other never meet.
    """
    of_list, place = _expanded(count)
    source = start[of_list] + place
    row, column = index[source], of_list % columns
    shift = (row - column * rows // columns) % rows
    band = band_of(rows)
    in_band = shift % band
    in_strides = shift - in_band + in_band * stride_of(band) % band
    keys = torch.stack([in_strides, shift, row ^ column, rows - 1 - row])
    most = 2 * max(rows, columns)
    return source[torch.argsort(of_list * most + keys)], count.cumsum(0) - count


def band_of(rows: int) -> int:
    """How many of the `rows` tiles of queries of a head a program walks before it goes on to the others."""
    return rows if rows <= 2 * _BAND else _BAND


def stride_of(band: int) -> int:
    """The stride in which the rows of a band are walked: near _STRIDE of the band, and coprime to it.

    >>> stride_of(128)
    49
    """
    return next(each for each in range(max(int(_STRIDE * band), 1), band + 2) if math.gcd(each, band) == 1)


def best_of(orders: Tensor, index: Tensor, head: Tensor, time: Tensor, rows: int, heads: int) -> Tensor:
    """Picks for each of `heads` the order in which the fewest entries meet others at the same tile of queries and the
    same time; an order after the first only if it is clearly better.
    """
    if not len(time):
        return orders[0]
    span, count = time.max() + 1, len(orders)
    place = ((head * rows + index[orders]) * span + time).sort().values
    meets = (place[:, 1:] == place[:, :-1]).long()
    of_head = place[:, 1:] // (span * rows) + torch.arange(count, device=time.device).unsqueeze(1) * heads
    meetings = torch.zeros(count * heads, dtype=torch.int64, device=time.device)
    meetings = meetings.index_add_(0, of_head.flatten(), meets.flatten()).view(count, heads)
    fewest, best = meetings[0], torch.zeros(heads, dtype=torch.int64, device=time.device)
    for number in range(1, count):
        is_better = meetings[number] * 10 < fewest * _CLEARLY
        best = torch.where(is_better, number, best)
        fewest = torch.where(is_better, meetings[number], fewest)
    return orders.gather(0, best[head].unsqueeze(0)).squeeze(0)


def chained(
    row: Tensor, time: Tensor, program: Tensor, rows: int, tiles: int, programs: int, shortest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The chain of each addition to one of `tiles` tiles of queries and its rank there; and each tile's first chain.

    rows: the tiles of one head. shortest: the least length of a chain where a tile has several.
    """
    made = torch.zeros(tiles, dtype=torch.int64, device=row.device).index_add_(0, row, torch.ones_like(row))
    of_head = made.view(-1, rows)
    live = (of_head > 0).sum(1, keepdim=True).clamp(min=1)
    longest = ((of_head.sum(1, keepdim=True) * _LONG_CHAIN + 4 * live - 1) // (4 * live)).clamp(min=shortest)
    chains = ((of_head + longest - 1) // longest).view(-1)
    first_chain = torch.cat([chains.new_zeros(1), chains.cumsum(0)])
    span = time.max() + 1 if len(time) else 1
    in_order = torch.argsort((row * span + time) * programs + program)
    first = made.cumsum(0) - made
    number = torch.empty_like(row)  # among the additions to the tile
    number[in_order] = torch.arange(len(row), device=row.device) - first[row[in_order]]
    several = chains.clamp(min=1)[row]
    return first_chain[row] + number % several, number // several, first_chain


def bits_by_key(lists: TileLists) -> Tensor:
    """The bits of the tiles with keys as rows. The lists have them with queries as rows."""
    keys, queries = lists.tiling.held, lists.tiling.streamed
    return transposed(lists.words.view(-1, queries, words_per_row(keys)), keys).flatten()


def _expanded(count: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    of_list = torch.repeat_interleave(count, output_size=total)
    return of_list, torch.arange(len(of_list), device=count.device) - (count.cumsum(0) - count)[of_list]

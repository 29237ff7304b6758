"""What the backward on Hopper walks: which program has which items, in which order, and the order of all additions.

An item is a tile of keys of one head of keys, with an entry for every live tile of queries of every query head of its
group. All is decided before the kernel runs, in four steps, each a function of what came before:

1. Items go to programs longest first where they are long, else head by head, each to a program with little work.
2. Every place in the list of a program has a time: how many entries come before it, an item counting as one more. The
   entries of an item are put in an order in which few meet others at one tile of queries at the same time.
3. The additions to a tile of queries are ordered by time, those of the same time by the number of the program. A tile
   with more of them than others has several chains, which take them in turn.
4. After each item its program finishes tiles of queries to which, by these times, all was added a while ago; what is
   left is shared among the last items of all programs.

That nothing can wait for ever needs no more of these times than that they increase along every program; see
`backward.py`. How long additions have to wait depends on how near they are to the truth.

The order of additions, and with it the last bits of dq, depends on how many programs and heads there are, as it does on
the mask; the same call gives the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseflash.backends.triton.hopper.plan import start_order
from sparseflash.backends.triton.schedule.worklists import TileLists
from sparseflash.blockmask.bitmask import transposed, words_per_row
from sparseflash.blockmask.streams import ReadyEvent
from sparseflash.blockmask.transfer import to_device

Ints = NDArray[np.int64]

# A tile of queries has one chain for so many additions, or for so many times the mean of its head. In a simulation of
# 16,384 tokens where an addition takes 1.2 times as long as the step that made it, causal masks take 1.02 times as long
# as without any order, and 1.20 times with one chain a tile; random blocks 1.12 and 1.13, global tokens 1.05 and more.
_SHORTEST_CHAIN = 16
_LONG_CHAIN = 1.25
# A tile of queries is finished by an item that ends so long after the last addition was made, in entries: others may
# be late, and to wait for them costs more than to read what may have left the cache.
_FINISH_AFTER = 6
# Rows are walked in strides of so much of all; another order is taken if less than this share of the entries meet.
_STRIDE = 0.382
_CLEARLY = 0.7


@dataclass(frozen=True)
class BackwardPlan:
    """The lists of all programs, and the chains of all tiles of queries."""

    start: Tensor  # int32 [programs + 1], the first item of each program
    # int32 [W, 8]: number of batch and head of keys, first key, first entry, how many, the first of the tiles of
    # queries that are finished after it, how many, two fillers
    work: Tensor
    # int32 [E + 1, 4]: number of batch, query head and tile of queries; number of the tile's bits, 0: full; chain; rank
    # in it. One more than there are, because the kernel reads one ahead.
    entries: Tensor
    chain: Tensor  # int32 [B * Hq * tiles + 1], the first chain of each tile of queries
    length: Tensor  # int32 [chains], how many additions are made to each
    finished: Tensor  # int32 [B * Hq * tiles], the tiles of queries in the order of the items after which they are
    words: Tensor  # int32 [T, 128 * 4], the bits of the partial tiles, of every key its queries
    chains: int
    made: ReadyEvent = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        made = ReadyEvent([getattr(self, each) for each in self.__dataclass_fields__ if each not in ("chains", "made")])
        object.__setattr__(self, "made", made)

    @property
    def programs(self) -> int:
        """How many run, all at the same time."""
        return len(self.start) - 1


def backward_plan(
    lists: TileLists, pattern: Tensor, kv_heads: int, q_len: int, k_len: int, device: torch.device, *, programs: int
) -> BackwardPlan:
    """The plan for `pattern [B, Hq]`, on `device`; `lists`: over columns. Made on the host."""
    patterns, counts_of, index, tile = (_on_host(x) for x in (pattern, lists.count, lists.index, lists.tile))
    heads, group = patterns.shape[1], patterns.shape[1] // kv_heads
    rows, columns = -(-q_len // lists.tiling.streamed), -(-k_len // lists.tiling.held)
    list_of = (patterns.reshape(-1, group)[:, None, :] * columns + np.arange(columns)[:, None]).reshape(-1, group)
    sizes = counts_of[list_of].sum(1)  # entries of every item, [B * Hkv * columns]
    program, order = assigned(sizes, programs)
    sequence = order[np.argsort(program[order], kind="stable")]  # the items, program by program
    program, sizes = program[sequence], sizes[sequence]

    first, per_program = np.cumsum(sizes) - sizes, np.bincount(program)
    begins = np.cumsum(per_program) - per_program  # the first item of each program, in the sequence
    time = first - first[begins][program] + np.arange(len(sequence)) - begins[program]  # when each item begins
    ends = time + sizes
    time = np.repeat(time - first, sizes) + np.arange(sizes.sum())  # and each entry
    program = np.repeat(program, sizes)

    lists_walked = list_of[sequence].ravel()  # of every item, one for each head of its group
    of_list, place = _expanded(counts_of[lists_walked])
    batch, kv_head = sequence // columns // kv_heads, sequence // columns % kv_heads
    head = ((batch * heads + kv_head * group)[:, None] + np.arange(group)).ravel()[of_list]
    places, walk_start = walks(_on_host(lists.start), counts_of, index, rows, columns)
    at = walk_start[lists_walked][of_list] + place
    source = best_of([walk[at] for walk in places], index, head, time, rows)
    row = head * rows + index[source]
    chain, rank, chains, done = chained(row, time, program, rows, patterns.size * rows)

    starts = np.append(begins, len(sequence))
    finished, *of_items = finishing(done, ends, starts[1:] - 1)
    work = np.zeros((len(sequence), 8), dtype=np.int64)
    numbers = (sequence // columns, sequence % columns * lists.tiling.held, first, sizes, *of_items)
    work[:, : len(numbers)] = np.stack(numbers, axis=1)
    entries = np.zeros((len(row) + 1, 4), dtype=np.int32)
    entries[:-1] = np.stack([row, tile[source], chain, rank], axis=1)
    length = np.bincount(chain, minlength=max(int(chains[-1]), 1))
    arrays = [torch.from_numpy(x.astype(np.int32)) for x in (starts, work, entries, chains, length, finished)]
    start, items, entered, chain_of, lengths, tiles = to_device(arrays, device)
    return BackwardPlan(start, items, entered, chain_of, lengths, tiles, _by_key(lists).to(device), int(chains[-1]))


def assigned(sizes: Ints, programs: int) -> tuple[Ints, Ints]:
    """The program of every item of these `sizes`, and the order in which items were given to programs.

    In `start_order`, each time to all programs that have about as little work as the one with the least: the longest of
    the next items to the program with the least. No program stays without an item if there are enough.

    >>> program, order = assigned(np.array([3, 1, 9, 2, 1, 3]), programs=2)
    >>> order.tolist(), [int(sizes.sum()) for sizes in (np.array([3, 1, 9, 2, 1, 3])[program == p] for p in (0, 1))]
    ([2, 0, 5, 3, 1, 4], [10, 9])
    """
    order = _on_host(start_order(torch.from_numpy(sizes), programs))
    cost = sizes + 1  # to begin with an item takes about as long as an entry
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


def walks(start: Ints, count: Ints, index: Ints, rows: int, columns: int) -> tuple[list[Ints], Ints]:
    """Orders in which the lists of columns may be walked, each as places in `index`; and where each list begins.

    In the first three, columns that begin together and have all rows never meet in one:

    - from the diagonal on, around the end, in strides: what columns have in common is spread over time;
    - from the diagonal on, around the end: columns of which each has all rows from some on never meet;
    - by `row ^ column`: nor do those of a butterfly;
    - from the last row back: nor do those of a causal mask that begin one after the other.
    """
    of_list, place = _expanded(count)
    source = start[of_list] + place
    row, column = index[source], of_list % columns
    shift = (row - column * rows // columns) % rows
    stride = next(each for each in range(max(int(_STRIDE * rows), 1), rows + 2) if math.gcd(each, rows) == 1)
    keys = (shift * stride % rows, shift, row ^ column, -row)
    return [source[np.lexsort((key, of_list))] for key in keys], np.cumsum(count) - count


def best_of(orders: list[Ints], index: Ints, head: Ints, time: Ints, rows: int) -> Ints:
    """Of each head the order in which the fewest entries meet others at the same tile of queries and the same time."""
    if not len(time):
        return orders[0]
    span, heads = int(time.max()) + 1, int(head.max()) + 1
    fewest = np.full(heads, len(time) + 1)
    best = np.zeros(heads, dtype=np.int64)
    for number, order in enumerate(orders):
        place = np.sort((head * rows + index[order]) * span + time)
        met = place[1:][place[1:] == place[:-1]] // (span * rows)
        meetings = np.bincount(met, minlength=heads)
        is_better = meetings < fewest * (_CLEARLY if number else 1)
        best[is_better], fewest = number, np.where(is_better, meetings, fewest)
    return np.choose(best[head], orders)


def chained(row: Ints, time: Ints, program: Ints, rows: int, tiles: int) -> tuple[Ints, Ints, Ints, Ints]:
    """The chain of each addition to one of `tiles` tiles of queries and its rank there; each tile's first chain, and
    the time of the last addition to it, -1 if there is none.

    `rows`: how many of the tiles are those of one head.
    """
    made = np.bincount(row, minlength=tiles)
    of_head = made.reshape(-1, rows)
    mean = of_head.sum(1, keepdims=True) / np.maximum((of_head > 0).sum(1, keepdims=True), 1)
    longest = np.maximum(np.ceil(_LONG_CHAIN * mean), _SHORTEST_CHAIN).astype(np.int64)
    chains = (-(-of_head // longest)).ravel()
    first_chain = np.append(0, np.cumsum(chains))
    span = (int(program.max()) + 1 if len(program) else 1, int(time.max()) + 1 if len(time) else 1)
    in_order = np.argsort((row * span[1] + time) * span[0] + program, kind="stable")
    first = np.cumsum(made) - made
    number = np.empty_like(row)  # among the additions to the tile
    number[in_order] = np.arange(len(row)) - first[row[in_order]]
    several = np.maximum(chains, 1)[row]
    done = np.where(made > 0, np.append(time[in_order], -1)[first + made - 1], -1)
    return first_chain[row] + number % several, number // several, first_chain, done


def finishing(done: Ints, ends: Ints, last: Ints) -> tuple[Ints, Ints, Ints]:
    """The tiles in the order in which items finish them; for every item, the first of its tiles and how many.

    done: when the last addition to each tile is made. ends: when each item ends. last: the last item of each program.
    An item finishes some of the tiles that were done a while before it ends; the last items share those that are left.
    """
    tiles, place = len(done), np.arange(1, len(ends) + 1)
    by_time, by_end = np.argsort(done, kind="stable"), np.argsort(ends, kind="stable")
    most = 2 * -(-tiles // len(ends))
    ready = np.searchsorted(done[by_time], ends[by_end] - _FINISH_AFTER, side="left")
    # Up to item i so many are taken: as many as are ready, but no more than `most` after what was taken before.
    taken = most * place + np.minimum(np.minimum.accumulate(ready - most * place), 0)
    item = np.repeat(by_end, np.diff(taken, prepend=0))
    item = np.append(item, last[np.arange(tiles - len(item)) % len(last)])
    order = np.argsort(item, kind="stable")
    count = np.bincount(item, minlength=len(ends))
    return by_time[order], np.cumsum(count) - count, count


def _by_key(lists: TileLists) -> Tensor:
    """The bits of tiles with keys as rows; those of a list have queries as rows."""
    keys, queries = lists.tiling.held, lists.tiling.streamed
    return transposed(lists.words.view(-1, queries, words_per_row(keys)), keys).flatten()


def _expanded(count: Ints) -> tuple[Ints, Ints]:
    """Of every entry of lists of these lengths, the number of its list and its place there."""
    of_list = np.repeat(np.arange(len(count)), count)
    return of_list, np.arange(len(of_list)) - np.repeat(np.cumsum(count) - count, count)


def _on_host(x: Tensor) -> Ints:
    return x.detach().cpu().numpy().astype(np.int64)

"""The plan of the Hopper backward in PyTorch operations: what the kernels of `persistent/fused_plan.py` are compared
with, and what they walk in the emulator.
"""

from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseflash.backends.triton.hopper import backward_pass
from sparseflash.backends.triton.persistent import backward_plan as rules
from sparseflash.backends.triton.persistent import cuts
from sparseflash.backends.triton.persistent.backward_plan import BackwardItem, BackwardPlan, Entry
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.backends.triton.schedule.splits import Cuts, Items, cut_items
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.schedule.work_item import CUT_PARTS
from sparseflash.backends.triton.schedule.worklists import TileLists
from sparseflash.blockmask.bitmask import transposed, words_per_row

Ints = NDArray[np.int64]


def planning():
    """A context in which the Hopper backward on a CPU walks a whole plan, not only its items."""
    return mock.patch.object(backward_pass, "_planned", planned)


def planned(plan: Plan, programs: int, tile: tuple[int, int]) -> BackwardPlan:
    lists = plan.lists.get(1, Tiling(*reversed(tile)))
    lists.ready.wait()
    sizes = plan.pattern, plan.kv_heads, *plan.lists.tokens
    return backward_plan(lists, *sizes, programs=programs, may_wait=plan.lists.reusable)


def backward_plan(
    lists: TileLists, pattern: Tensor, kv_heads: int, q_len: int, k_len: int, *, programs: int, may_wait: bool = True
) -> BackwardPlan:
    """The plan for `pattern [B, Hq]`. lists: over columns. may_wait: False for a dynamic mask."""
    batch, heads = pattern.shape
    rules.check_entries(lists, pattern, q_len, k_len)
    group = heads // kv_heads
    rows, columns = -(-q_len // lists.tiling.streamed), -(-k_len // lists.tiling.held)
    list_of = (pattern.long().view(-1, 1, group) * columns + torch.arange(columns).unsqueeze(1)).view(-1, group)
    counts, index = lists.count.long(), lists.index.long()
    walked, walk_start = walks(lists.start.long(), counts, index, rows, columns)
    parts, merged = cut(walk_start[list_of], counts[list_of], programs, cuts.RULE if may_wait else cuts.NEVER)
    items = _dealt(parts.size.sum(1).numpy(), programs)
    if not may_wait:  # all programs, some perhaps without an item
        items = items._replace(start=np.pad(items.start, (0, programs + 1 - len(items.start)), mode="edge"))
    sequence, size, first, program, time, start = map(torch.from_numpy, items)
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
    shortest = rules._SHORTEST_CHAIN if may_wait else rules.ONE_CHAIN
    made = torch.zeros(tiles + 1, dtype=torch.int64)
    made[1:] = torch.bincount(row, minlength=tiles).cumsum(0)
    chain, rank, chains = chained(row, time, program, rows, tiles, programs, shortest)

    first_key = number % columns * lists.tiling.held
    work = torch.stack(BackwardItem(number // columns, first_key, first, size, parts.part[sequence, 0]), dim=1)
    entries = torch.stack(Entry(row, lists.tile[source], chain, rank), dim=1)
    parts_cut = int(merged[:, CUT_PARTS.value].sum())
    most = int(chains[-1]) if may_wait else tiles
    words = bits_by_key(lists)
    listed = start.int(), work.int(), entries.int(), made.int(), chains.int()
    return BackwardPlan(*listed, words, most, merged, parts_cut)


def cut(start: Tensor, size: Tensor, programs: int, rule: cuts.Rule) -> tuple[Items, Tensor]:
    """All items, the too long ones in parts; and the items that are cut, as `cut_items` returns them.

    start, size: int64 `[W, group]`, of the lists of each item.
    """
    number = torch.arange(len(size)).unsqueeze(1)
    parts = cuts.parts_of(size.sum(1), programs, rule)
    chosen = Cuts(parts, int(parts.sum()), int((parts > 1).sum()))
    return cut_items(Items(number, start, size, size, torch.zeros_like(number)), chosen)


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


def _dealt(sizes: Ints, programs: int) -> _Items:
    program, order = rules.assigned(sizes, programs)
    sequence = order[np.argsort(program[order], kind="stable")]
    program, sizes = program[sequence], sizes[sequence]
    first, start = np.cumsum(sizes) - sizes, np.append(0, np.cumsum(np.bincount(program)))
    time = first - first[start[:-1]][program] + np.arange(len(sequence)) - start[program]
    return _Items(sequence, sizes, first, program, time, start)


def walks(start: Tensor, count: Tensor, index: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """The orders of `timeline._key` in which the lists of columns may be walked, each as places in `index`; and where
    each list begins.
    """
    of_list, place = _expanded(count)
    source = start[of_list] + place
    row, column = index[source], of_list % columns
    shift = (row - column * rows // columns) % rows
    band = rules.band_of(rows)
    in_band = shift % band
    in_strides = shift - in_band + in_band * rules.stride_of(band) % band
    keys = torch.stack([in_strides, shift, row ^ column, rows - 1 - row])
    most = 2 * max(rows, columns)
    return source[torch.argsort(of_list * most + keys)], count.cumsum(0) - count


def best_of(orders: Tensor, index: Tensor, head: Tensor, time: Tensor, rows: int, heads: int) -> Tensor:
    """Picks for each of `heads` the order in which the fewest entries meet others at the same tile of queries and the
    same time; an order after the first only if it is clearly better.
    """
    if not len(time):
        return orders[0]
    span, count = time.max() + 1, len(orders)
    place = ((head * rows + index[orders]) * span + time).sort().values
    meets = (place[:, 1:] == place[:, :-1]).long()
    of_head = place[:, 1:] // (span * rows) + torch.arange(count).unsqueeze(1) * heads
    meetings = torch.zeros(count * heads, dtype=torch.int64)
    meetings = meetings.index_add_(0, of_head.flatten(), meets.flatten()).view(count, heads)
    fewest, best = meetings[0], torch.zeros(heads, dtype=torch.int64)
    for number in range(1, count):
        is_better = meetings[number] * 10 < fewest * rules._CLEARLY
        best = torch.where(is_better, number, best)
        fewest = torch.where(is_better, meetings[number], fewest)
    return orders.gather(0, best[head].unsqueeze(0)).squeeze(0)


def chained(
    row: Tensor, time: Tensor, program: Tensor, rows: int, tiles: int, programs: int, shortest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The chain of each addition to one of `tiles` tiles of queries and its rank there; and each tile's first chain.

    rows: the tiles of one head. shortest: the least length of a chain where a tile has several.
    """
    made = torch.zeros(tiles, dtype=torch.int64).index_add_(0, row, torch.ones_like(row))
    of_head = made.view(-1, rows)
    live = (of_head > 0).sum(1, keepdim=True).clamp(min=1)
    total = of_head.sum(1, keepdim=True)
    longest = (total * rules._LONG_CHAIN + 4 * live - 1) // (4 * live)
    is_few = total > rules._FEW * live * live
    longest = torch.where(is_few, (total + programs - 1) // programs, longest).clamp(min=shortest)
    chains = ((of_head + longest - 1) // longest).view(-1)
    first_chain = torch.cat([chains.new_zeros(1), chains.cumsum(0)])
    span = time.max() + 1 if len(time) else 1
    in_order = torch.argsort((row * span + time) * programs + program)
    first = made.cumsum(0) - made
    number = torch.empty_like(row)  # among the additions to the tile
    number[in_order] = torch.arange(len(row)) - first[row[in_order]]
    several = chains.clamp(min=1)[row]
    return first_chain[row] + number % several, number // several, first_chain


def bits_by_key(lists: TileLists) -> Tensor:
    """The bits of the tiles with keys as rows. The lists have them with queries as rows."""
    keys, queries = lists.tiling.held, lists.tiling.streamed
    return transposed(lists.words.view(-1, queries, words_per_row(keys)), keys).flatten()


def _expanded(count: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    of_list = torch.repeat_interleave(count, output_size=total)
    return of_list, torch.arange(len(of_list)) - (count.cumsum(0) - count)[of_list]

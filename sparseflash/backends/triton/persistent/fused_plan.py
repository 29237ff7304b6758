"""Makes the plan of the backward on a GPU, with kernels. See `backward_plan.py` for what it does.

In PyTorch operations, a plan takes 215 operations, which the host launches one by one, three of them sorts of entries,
and a loop on the host. The host waits once, for the numbers of entries and chains and for the end of the timeline. For
a dynamic mask it does not wait, and launches eight kernels and one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from sparseflash.backends.triton.compile_ahead import compile_rehearsed
from sparseflash.backends.triton.launcher import Launch
from sparseflash.backends.triton.persistent import backward_plan as rules
from sparseflash.backends.triton.persistent import cuts, dealing, timeline
from sparseflash.backends.triton.persistent.backward_plan import BackwardPlan
from sparseflash.backends.triton.persistent.dealing import COUNT_BITS
from sparseflash.backends.triton.schedule.work_item import CUT_ITEM
from sparseflash.backends.triton.schedule.worklists import TileLists
from sparseflash.blockmask.bitmask import words_per_row
from sparseflash.blockmask.cache import bounded

_AT_ONCE = 1024  # items that one program reads at a time
_RANKED = 16  # items that one program ranks at a time
_RANKING = 64  # programs that rank items
_ORDERS = 4
_FEWEST_LANES = 32


def backward_plan(
    lists: TileLists, counted: Tensor, pattern: Tensor, kv_heads: int, q_len: int, k_len: int, *, programs: int,
    may_wait: bool = True,
) -> BackwardPlan:  # fmt: skip
    """The plan for `pattern [B, Hq]`, on its device.

    lists: over columns. counted: int32 `[P * rows]`, the number of entries of every row. may_wait: whether the host may
    wait for the device, once. Otherwise the plan has room for all entries that heads with patterns of the mask can
    have.
    """
    rules.check_entries(lists, pattern, q_len, k_len)
    items = cuts.most_items(len(pattern) * kv_heads * -(-k_len // lists.tiling.held), programs)
    if items >> COUNT_BITS.value:
        raise ValueError(
            f"the tiles of keys of all heads must be fewer than {1 << COUNT_BITS.value:,} for the backward of the "
            f"Hopper kernels; got {items:,}. Split the batch or the heads, or pass backend='triton'."
        )
    lanes = max(triton.next_power_of_2(programs), _FEWEST_LANES)
    kernels = _kernels(pattern.device, lanes, *lists.tiling[1::-1])
    given = lists, counted, pattern, kv_heads, q_len, k_len, programs, lanes, may_wait
    started = kernels if may_wait else kernels[: -len(_OF_TIMES)]

    def rehearse(stand_ins: Sequence[Any]) -> None:
        _planned(_Kernels(*stand_ins, *kernels[len(stand_ins) :]), torch.device("meta"), *given)

    compile_rehearsed(started, rehearse)
    return _planned(kernels, pattern.device, *given)


def _planned(
    kernels: _Kernels, device: torch.device, lists: TileLists, counted: Tensor, pattern: Tensor, kv_heads: int,
    q_len: int, k_len: int, programs: int, lanes: int, may_wait: bool,
) -> BackwardPlan:  # fmt: skip
    """The plan. device: the meta device in a rehearsal, where the numbers that the host would wait for are made up."""
    batch, query_heads = pattern.shape
    keys, queries, _ = lists.tiling
    rows, columns = -(-q_len // queries), -(-k_len // keys)
    group, heads = query_heads // kv_heads, batch * query_heads
    items, tiles = batch * kv_heads * columns, heads * rows
    room = cuts.most_items(items, programs) if may_wait else items

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    made, cursor, meeting = empty(2, tiles + 1), empty(tiles), empty(_ORDERS, heads)
    kernels.chain.start(
        heads, pattern, counted, made, cursor, meeting, *pattern.stride(), query_heads, rows, tiles, programs,
        rules._SHORTEST_CHAIN if may_wait else rules.ONE_CHAIN, rules._LONG_CHAIN, rules._FEW,
    )  # fmt: skip
    made = made.cumsum(1, dtype=torch.int32)

    size, first, merged = empty(items), empty(2, items + 1), empty(items, CUT_ITEM.value)
    part_size, order, ranked, dealt, total = empty(room), empty(2, room), empty(room), empty(3, room), empty(8)
    start, first_entry = empty(programs + 1), empty(programs + 1)
    rule = cuts.RULE if may_wait else cuts.NEVER
    place = (*pattern.stride(), kv_heads, columns, group)
    kernels.size.start(-(-items // _AT_ONCE), pattern, lists.count, size, *place, items, _AT_ONCE)
    kernels.cut.start(
        1, size, first, part_size, merged, total, order, ranked, items, programs, *rule, room, rules.LEAST, _AT_ONCE
    )
    kernels.rank_items.start(_RANKING, part_size, ranked, total, order, room, _RANKED)
    kernels.deal.start(
        1, order, made, dealt, start, first_entry, total, tiles, programs, room, lanes, lanes.bit_length() - 1
    )
    distinct = lists.words.numel() // (queries * words_per_row(keys))
    words = empty(distinct * keys * words_per_row(queries))
    kernels.transpose.start(distinct * words_per_row(queries), lists.words, words, queries, keys)
    walked = pattern, lists.start, lists.count, lists.index
    band = rules.band_of(rows)
    place += (rows, band, rules.stride_of(band), room)
    if may_wait:
        # The only time that the host waits.
        parts, parts_cut, cut, entries, chains, span = [1] * 6 if total.is_meta else total[:6].tolist()
        programs = min(programs, parts)
        cells = torch.full((_ORDERS, span, programs), -1, dtype=torch.int32, device=device)
        kernels.timeline.start(items * group, *walked, size, first, dealt, cells, *place, span, programs)
        kernels.meet.start(span, cells, meeting, rows, heads, span, programs, lanes)
    else:
        parts, parts_cut, cut, chains = items, 0, 0, tiles
        entries = heads * min(len(lists.index) - 1, rows * columns)
    work, listed = empty(parts, rules.ITEM.value), empty(entries, rules.ENTRY.value)
    moment, added = empty(entries, dtype=torch.int64), empty(entries)
    kernels.entry.start(
        items * group, *walked, lists.tile, size, first, part_size, dealt, start, first_entry, meeting, made, cursor,
        moment, added, work, listed, *place, items, programs, heads, keys, rules._CLEARLY,
    )  # fmt: skip
    first_made, first_chain = made
    kernels.rank.start(tiles, first_made, first_chain, cursor, moment, added, listed)
    return BackwardPlan(
        start[: programs + 1], work, listed, first_made, first_chain, words, chains, merged[:cut], parts_cut
    )  # fmt: skip


class _Kernels(NamedTuple):
    chain: Launch
    size: Launch
    cut: Launch
    rank_items: Launch
    deal: Launch
    transpose: Launch
    entry: Launch
    rank: Launch
    timeline: Launch
    meet: Launch


_OF_TIMES = _Kernels._fields[-2:]  # started only by a plan that may wait

# Warps of a program: one or two where many programs walk short lists, eight where one program sorts. At 65,536 tokens
# and 64 heads of selected blocks the entries took 169 us with four warps and 57 us with one; the deal 126 us with four
# and 96 us with eight, and the cut of 2,048 items 21 us with four and 16 us with eight (H200).
_WARPS = {"timeline": 1, "entry": 1, "rank": 2, "cut": 8, "deal": 8}


# Triton specialises these kernels on nothing but their arguments: see `Launch.of_all_arguments`.
@bounded(maxsize=32)
def _kernels(device: torch.device, lanes: int, queries: int, keys: int) -> _Kernels:
    functions = (
        timeline.chain_kernel, dealing.size_kernel, dealing.cut_kernel, dealing.rank_items_kernel, dealing.deal_kernel,
        timeline.transpose_kernel, timeline.entry_kernel, timeline.rank_kernel, timeline.timeline_kernel,
        timeline.meet_kernel,
    )  # fmt: skip
    warps = (_WARPS.get(name, 4) for name in _Kernels._fields)
    return _Kernels(
        *(Launch.of_all_arguments(each, device, num_warps=w, num_stages=1) for each, w in zip(functions, warps))
    )

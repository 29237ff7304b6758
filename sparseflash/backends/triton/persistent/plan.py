"""The work plan of the Hopper forward: its items, the cuts of long rows, and the order in which items are taken.

Programs draw items from one list, so the clock decides which program runs an item. No result depends on it: an item is
computed in the order of its own list, and only a row and the other rows of its pattern decide how the row is cut.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.schedule import longest_first
from sparseflash.backends.triton.schedule.splits import Cuts, Items, cut_items
from sparseflash.backends.triton.schedule.work_item import place
from sparseflash.backends.triton.schedule.worklists import TileLists, Worklist, check_number_of_items


class Rule(NamedTuple):
    """When a row is cut into chunks.

    A row far longer than the others of its pattern, such as the row of a global token, would still run when all others
    are done, unless there are many others. With 2 global rows of 128 tiles among 126 rows of about 8, an SM has 9 tiles
    to do for one head and 150 for 16. A chunk costs about two tiles, to write its sums and to merge them.

    Few queries of many keys are few items, whatever their lengths: a chunk of a long prompt, or cross-attention. How
    many heads share the SMs is not known here, as a row's bits must not depend on it. So a head has up to `few_items`
    items, half as many for one row, in chunks of `chunk` to `few_chunk` tiles. On an H200, chunks of 32 tiles in place
    of whole rows of 128 take 0.35 of the time for 2 rows and 16 heads, 1.07 for 128 heads; for 1 row of 512 tiles and
    128 heads, chunks of 128, 64 and 32 tiles take 1.06, 1.09 and 1.15 of the time of whole rows.
    """

    far: float = 4.0  # a row is cut if it is longer than this many times the mean of its pattern,
    chunk: int = 32  # tiles of the longest chunk,
    worth: float = 1.5  # and longer than this many chunks.
    few: int = 4  # With more tiles of keys than this for each tile of queries, all long rows are cut,
    few_chunk: int = 128  # into longer chunks of at most this many tiles,
    few_items: int = 8  # if a head then has this many.

    def chunk_of_few(self, rows: int, columns: int) -> int:
        """The tiles of a chunk of few queries. rows, columns: tiles of the queries and keys of a head.

        >>> [RULE.chunk_of_few(*tiles) for tiles in ((2, 128), (4, 128), (8, 128), (1, 512), (8, 512))]
        [32, 64, 128, 128, 128]
        """
        wanted = columns * max(rows, 2) // self.few_items
        return min(max(wanted, self.chunk), self.few_chunk)


RULE = Rule()


class ForwardItem(NamedTuple):
    """The first entry of the list is repeated here, to avoid two dependent loads."""

    number: Any  # of batch, head and tile of queries
    start: Any  # of its list, like the next two: see `TileLists`
    full: Any
    count: Any
    block: Any  # of the first tile of the list
    tile: Any  # the number of that tile's bits; 0: full; -1: dead
    part: Any  # number among all chunks of rows that are cut, from 1; 0: not cut
    unused: Any  # pads an item to 32 bytes


ITEM = tl.constexpr(len(ForwardItem._fields))
ITEM_NUMBER = place(ForwardItem, "number")
ITEM_START = place(ForwardItem, "start")
ITEM_FULL = place(ForwardItem, "full")
ITEM_COUNT = place(ForwardItem, "count")
ITEM_BLOCK = place(ForwardItem, "block")
ITEM_TILE = place(ForwardItem, "tile")
ITEM_PART = place(ForwardItem, "part")
ITEM_UNUSED = place(ForwardItem, "unused")


def forward_plan(
    lists: TileLists, pattern: Tensor, q_len: int, k_len: int, *, programs: int, may_wait: bool = True,
    may_cut: bool = True,
) -> Worklist:  # fmt: skip
    """The plan for `pattern [B, Hq]`, with items `[W, ITEM]`.

    A row without tiles has one dead tile, number -1.

    programs: how many run at a time; only the order depends on it. may_wait: False for a dynamic mask. Then no row is
    cut, and the order is the portable kernels'; on a GPU `dynamic_plan.py` makes the same plan with kernels. Otherwise
    the host waits for the device, once, where rows may have to be cut; if not may_cut, none is.
    """
    batch, heads = pattern.shape
    rows = -(-q_len // lists.tiling.held)
    check_number_of_items(batch, heads, rows)
    place = torch.arange(rows, device=pattern.device)
    row = (pattern.long().unsqueeze(-1) * rows + place).view(-1, 1)  # [W, 1]
    number = torch.arange(len(row), dtype=torch.int32, device=pattern.device).unsqueeze(1)
    start = lists.start[row]
    items = Items(number, start, lists.full[row], lists.count[row], torch.zeros_like(start))
    parts, merged = 0, None
    columns = -(-k_len // lists.tiling.streamed)
    if may_wait and may_cut and columns > RULE.worth * RULE.chunk:
        chunks = _chunks(lists.count, rows, columns)[row.view(-1)]
        total, cut = torch.stack([chunks.sum(), (chunks > 1).sum()]).tolist()
        if cut:
            cuts = Cuts(chunks, total, cut)
            items, merged = cut_items(items, cuts)
            parts = cuts.parts
    index, tile = lists.index, lists.tile
    if len(index) < 2:  # a mask without a tile: the kernel reads one tile ahead even then
        index, tile = torch.cat([index, index]), torch.cat([tile, tile])
    lengths = items.size.view(-1)
    order = start_order(lengths.clamp(min=1), programs) if may_wait else longest_first.start_order(lengths)
    return Worklist(_work(items, index, tile)[order].contiguous(), index, tile, lists.words, parts, merged)


def _chunks(count: Tensor, rows: int, columns: int) -> Tensor:
    """The number of chunks of each row: int64. count: each `rows` numbers are one pattern."""
    tiles = count.view(-1, rows).long()
    is_few = columns > RULE.few * rows
    is_far = tiles * rows > RULE.far * tiles.sum(1, keepdim=True)
    chunk = torch.where(is_far, RULE.chunk, RULE.chunk_of_few(rows, columns))
    is_worth = tiles > RULE.worth * chunk
    return torch.where((is_far | is_few) & is_worth, -(-tiles // chunk), 1).view(-1)


def _work(items: Items, index: Tensor, tile: Tensor) -> Tensor:
    """int32 [W, ITEM], in the order of the items."""
    number, start, full, count, part = (x.view(-1) for x in items)
    is_empty = count == 0
    start = torch.where(is_empty, 0, start)
    first_block = torch.where(is_empty, 0, index[start.long()])
    first_tile = torch.where(is_empty, -1, tile[start.long()])
    count = count.clamp(min=1)
    work = ForwardItem(number, start, full, count, first_block, first_tile, part, torch.zeros_like(part))
    return torch.stack(work, dim=-1)


def start_order(lengths: Tensor, programs: int, *, least: int = 0) -> Tensor:
    """The order in which `programs` programs take items of these `lengths [W]`, in tiles: int64 `[W]`.

    least: the least length of an item that may count as long, in percent of a program's mean load.

    Items more than twice as long as the mean come first, longest first, and the last three rounds are longest first.
    The others stay in order, head by head, so that the keys stay in the L2 cache. Sorting all items over all heads
    takes longer (experiments/results/tried/kernels.csv).

    >>> start_order(torch.tensor([3, 1, 9, 2, 1, 3]), programs=1).tolist()
    [2, 0, 1, 5, 3, 4]
    >>> start_order(torch.tensor([3, 1, 9, 2, 1, 3]), programs=1, least=50).tolist()
    [0, 1, 2, 5, 3, 4]
    """
    longest, total = 1 << 31, lengths.sum()
    is_long = (lengths * len(lengths) > 2 * total) & (lengths.long() * (100 * programs) >= least * total)
    place = (~is_long).cumsum(0)
    is_last = ~is_long & (place > place[-1:] - 3 * programs)
    by_length = longest - lengths.long()
    key = torch.where(is_long, by_length, torch.where(is_last, by_length + 2 * longest, longest))
    return torch.sort(key, stable=True).indices

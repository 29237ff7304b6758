"""The execution plan: for each program of a kernel, which tiles it walks, and in which order programs start.

Derived from a mask once and kept with it. A dynamic mask made on the GPU is planned there without waiting for it; for
any other the host may look once at how long the lists are, to cut those that are far too long (see splits.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.triton.cuda_graphs import refuse_to_record
from sparseflash.backends.triton.schedule.launch_order import start_order
from sparseflash.backends.triton.schedule.retiling import Retiled
from sparseflash.backends.triton.schedule.splits import Items, cut_items, cuts_of
from sparseflash.backends.triton.schedule.tilings import Cost, Tile, Tiling, Warps, usual_warps
from sparseflash.backends.triton.schedule.worklists import Lists, full_first, one_more
from sparseflash.blockmask import bitmask
from sparseflash.blockmask.cache import is_countable, mask_cache
from sparseflash.blockmask.csr import columns_of
from sparseflash.blockmask.streams import ReadyEvent

_MOST_PLANS = 64  # of a mask, or without one: who has so many batch sizes or lengths has few calls of each


@dataclass(frozen=True)
class Side:
    """What a kernel over rows or columns needs: its work items, and the lists that they point into."""

    work: Tensor  # int32 [W, group, 8]
    index: Tensor
    tile: Tensor
    words: Tensor
    parts: int = 0  # items that are chunks of longer ones, and write partial results
    merged: Tensor | None = None  # int32 [items that are cut, 4], see cut_items
    made: ReadyEvent = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        made = ReadyEvent((self.work, self.index, self.tile, self.words, self.merged))
        object.__setattr__(self, "made", made)


class Plan:
    """The plans of one mask for one batch size and number of heads, and the launches prepared for it."""

    def __init__(
        self, rows: Lists, columns: Lists | None, pattern: Tensor, kv_heads: int, lengths: tuple[int, int],
        tiles_total: int, *, shared: bool, countable: bool, lasting: bool, retiled: Retiled | None = None,
    ) -> None:  # fmt: skip
        # In the tiles of the mask; the columns are None until a backward needs them.
        self._own: list[Lists | None] = [rows, columns]
        self._retiled = retiled  # in others; None if the mask has to be run as it is
        self._pattern = pattern  # int32 [B, Hq]
        self._kv_heads = kv_heads
        self._lengths = lengths
        self._sides: dict[tuple[int, int, Tiling | None, int], Side] = {}
        self._shared = shared  # one pattern for all heads
        self._countable = countable  # the host may ask the device how long the lists are
        self.lasting = lasting  # serves calls that a CUDA graph being recorded knows nothing of
        self.tiles_total = tiles_total  # about the number of tiles that all heads walk together
        self.launches: dict[Any, Any] = {}  # filled by launch.py

    @property
    def device(self) -> torch.device:
        """Where the mask lies."""
        return self._pattern.device

    def rows(self, tile: int, tiling: Tiling | None = None, *, resident: int = 2) -> Side:
        """Work over tiles of `tile` queries (a divisor of those that the tiling holds), one list each.

        `tiling`: None for the tiles of the mask. `resident`: how many programs a multiprocessor runs at a time.
        """
        return self._side(0, tile, tiling, resident, self._pattern.unsqueeze(-1))

    def columns(self, tile: int, tiling: Tiling | None = None, *, resident: int = 2) -> Side:
        """Work over tiles of `tile` keys, one list a query head of the group that shares the key head."""
        batch, heads = self._pattern.shape
        return self._side(1, tile, tiling, resident, self._pattern.view(batch, self._kv_heads, heads // self._kv_heads))

    def tiling(self, axis: int, whole: Tile, gathered: Tile, cost: Cost, warps: Warps = usual_warps) -> Tiling | None:
        """What a kernel over `axis`, 0: rows, 1: columns, should walk, given the tiles that it would take itself.

        None for the tiles of the mask. Counting waits for the device, once a mask.
        """
        return None if self._retiled is None else self._retiled.tiling(axis, whole, gathered, cost, warps)

    def _side(self, axis: int, tile: int, tiling: Tiling | None, resident: int, pattern: Tensor) -> Side:
        own = self._own[axis]
        if own is None:
            raise RuntimeError("this plan was made without columns")
        if tiling == own.tiling:
            tiling = None
        key = (axis, tile, tiling, resident)
        if key not in self._sides:
            if tiling is None:
                self._sides[key] = self._made(own, pattern, axis, tile, resident, self.tiles_total)
            elif self._retiled is None:
                raise RuntimeError(f"this plan has the tiles of its mask only; asked for {tiling}")
            else:
                lists = self._retiled.lists(axis, tiling)
                # As long as all heads have one pattern, which is when the total matters.
                total = (len(lists.tile) - 1) * pattern.numel()
                self._sides[key] = self._made(lists, pattern, axis, tile, resident, total)
        return self._sides[key]

    def _made(self, lists: Lists, pattern: Tensor, axis: int, tile: int, resident: int, total: int) -> Side:
        """The work over `axis`, in tiles of `tile` tokens."""
        lists.made.wait()
        held, streamed, _ = lists.tiling
        items = _items(lists, pattern, self._lengths[axis], tile)
        group = pattern.shape[-1]
        cuts = cuts_of(
            items.size,
            streamed,
            tile,
            resident,
            most=-(-self._lengths[1 - axis] // streamed) * group,
            total=total * (held // tile) if self._shared else None,
            each=None if lists.each is None else lists.each * group,
            countable=self._countable,
        )
        parts, merged = 0, None
        if cuts is not None:
            parts = cuts.total - (len(items.size) - cuts.cut)
            items, merged = cut_items(items, cuts)
        return Side(_in_start_order(items, lists), lists.index, lists.tile, lists.words, parts, merged)

    def take_columns(self, columns: Lists) -> None:
        """Completes a plan that was made without them."""
        self._own[1] = columns


def plan_of(
    indptr: Tensor, indices: Tensor, tile: Tensor, words: Tensor, pattern: Tensor, q_heads: tuple[int, int],
    kv_heads: int, lengths: tuple[int, int], blocks: tuple[int, int], *, columns: bool = True,
) -> Plan:  # fmt: skip
    """The plan of a mask for `q_heads = (batch, query heads)`, from the mask's cache.

    `columns`: the backward will be run, too. A mask made for one inference is spared half of the work.
    """
    cache = mask_cache(indices)
    key = ("plan", q_heads, kv_heads)
    row_blocks, col_blocks = (-(-n // b) for n, b in zip(lengths, blocks, strict=True))
    # A dynamic mask may itself have been made by what is being recorded.
    lasting = is_countable(indices)
    if lasting and (key not in cache or (columns and "column lists" not in cache)):
        refuse_to_record(indices.device)
    plan: Plan | None = cache.get(key)
    if plan is None:
        kept = [each for each in list(cache) if each[0] == "plan"]
        if len(kept) >= _MOST_PLANS:
            cache.pop(kept[0], None)
        if "row lists" not in cache:
            if lasting:  # before the lists, by which another thread tells that both are there
                cache["retiled"] = Retiled(indptr, indices, tile, words, pattern, lengths, blocks)
            cache["row lists"] = full_first(indptr, indices, tile, words, Tiling(*blocks))
        patterns = (len(indptr) - 1) // row_blocks
        total = len(indices) * q_heads[0] * q_heads[1] // patterns
        # Every pattern is used by some head, but patterns may be shared by unequal numbers of heads: an estimate.
        plan = cache[key] = Plan(
            cache["row lists"], None, pattern.expand(q_heads), kv_heads, lengths, total,
            shared=patterns == 1, countable=lasting, lasting=lasting, retiled=cache.get("retiled"),
        )  # fmt: skip
    if columns:
        if "column lists" not in cache:
            arrays = columns_of(indptr, indices, tile, row_blocks, col_blocks)
            cache["column lists"] = full_first(*arrays, words, Tiling(*blocks[::-1]))
        plan.take_columns(cache["column lists"])
    return plan


@lru_cache(maxsize=_MOST_PLANS)
def dense_plan(
    q_heads: tuple[int, int], kv_heads: int, lengths: tuple[int, int], blocks: tuple[int, int], device: torch.device
) -> Plan:
    """The plan of a mask with every tile full, which stores nothing that grows with `Nq * Nk`."""
    refuse_to_record(device)
    (q_len, k_len), (block_q, block_k) = lengths, blocks
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)
    end_q, end_k = q_len - (row_blocks - 1) * block_q, k_len - (col_blocks - 1) * block_k
    words = torch.cat(
        [
            bitmask.rectangle(block_q, block_k, block_q, end_k, device),  # tile 1: the last column
            bitmask.rectangle(block_q, block_k, end_q, block_k, device),  # tile 2: the last row
            bitmask.rectangle(block_q, block_k, end_q, end_k, device),  # tile 3: the corner
        ]
    ).view(-1)
    last_col, last_row = (1 if end_k < block_k else 0), (2 if end_q < block_q else 0)
    corner = last_col + last_row
    rows = _dense_lists(row_blocks, col_blocks, last_col, last_row, corner, words, Tiling(block_q, block_k))
    columns = _dense_lists(col_blocks, row_blocks, last_row, last_col, corner, words, Tiling(block_k, block_q))
    pattern = torch.zeros(q_heads, dtype=torch.int32, device=device)
    total = row_blocks * col_blocks * q_heads[0] * q_heads[1]
    return Plan(rows, columns, pattern, kv_heads, lengths, total, shared=True, countable=False, lasting=True)


def _dense_lists(
    rows: int, cols: int, last_col: int, last_row: int, corner: int, words: Tensor, tiling: Tiling
) -> Lists:
    """Two lists serve all rows: one for the last, whose tiles may all be cut, and one for the others."""
    device = words.device
    index = torch.arange(cols, dtype=torch.int32, device=device)
    tile = torch.zeros(2, cols, dtype=torch.int32, device=device)
    tile[0, -1] = last_col
    tile[1] = last_row
    tile[1, -1] = corner
    start = torch.zeros(rows, dtype=torch.int32, device=device)
    start[-1] = cols
    full = torch.full((rows,), cols - (last_col > 0), dtype=torch.int32, device=device)
    if last_row:
        full[-1] = 0
    count = torch.full((rows,), cols, dtype=torch.int32, device=device)
    index, tile = one_more(torch.cat([index, index])), one_more(tile.view(-1))
    return Lists(start, full, count, index, tile, words, tiling, cols)


def _items(lists: Lists, pattern: Tensor, length: int, tile: int) -> Items:
    """Work items for `pattern [B, H, group]`, in the order of their numbers: W = B * H * T."""
    batch, heads, group = pattern.shape
    device = pattern.device
    count_tiles = -(-length // tile)
    if batch * heads * count_tiles >= 2**31:
        raise ValueError(
            f"batch x heads x tiles must be below 2^31; got {batch} x {heads} x {count_tiles}. Split the batch."
        )
    block = lists.tiling.held
    block_row = torch.arange(count_tiles, device=device) * tile // block  # [T]
    blocks = -(-length // block)
    row = pattern.long().unsqueeze(2) * blocks + block_row[:, None]  # [B, H, T, group]
    row = row.reshape(-1, group)
    number = torch.arange(len(row), device=device, dtype=torch.int32).unsqueeze(1).expand(-1, group)
    start = lists.start[row]
    return Items(number, start, lists.full[row], lists.count[row], torch.zeros_like(start))


def _in_start_order(items: Items, lists: Lists) -> Tensor:
    """What the kernels read: int32 `[W, group, 8]`, in the order in which programs start.

    An item is `(batch and head and tile as one number, start, full, count)` of its list, then the first full block,
    the first partial block and its tile number, and its place among the chunks. The firsts stand here, too, because a
    program that had to look them up would wait for memory once more before it can load any key.
    """
    masked = items.start + items.full
    index = lists.index.view(len(lists.tile), -1)[:, 0]  # of a gathered tile, which has several, none is read
    firsts = index[items.start.long()], index[masked.long()], lists.tile[masked.long()]
    work = torch.stack([*items[:4], *firsts, items.part], dim=-1)
    return work[start_order(items.size.sum(1))].contiguous()

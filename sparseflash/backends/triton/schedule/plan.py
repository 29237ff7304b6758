"""The execution plan: which tiles each program of a kernel processes, and the order in which programs start.

Made once per mask and cached with it. A small mask from the host is planned there, because launching the operations on
a GPU would take longer; others on the device, a dynamic mask without synchronisation, on a GPU by the kernels of
fused.py. Otherwise the host may read the lengths of the lists once, to cut lists that are too long (splits.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparseflash.backends.problem import Problem
from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.device import refuse_to_record, runs_kernels
from sparseflash.backends.triton.overrides import overrides
from sparseflash.backends.triton.schedule import fused, host_plan
from sparseflash.backends.triton.schedule.longest_first import start_order
from sparseflash.backends.triton.schedule.retiling import Retiling
from sparseflash.backends.triton.schedule.splits import Items, cut_items, cuts_of, may_be_cut
from sparseflash.backends.triton.schedule.tilings import Cost, Tile, Tiling, Warps, usual_warps
from sparseflash.backends.triton.schedule.work_item import WorkItem
from sparseflash.backends.triton.schedule.worklists import (
    TileLists,
    Worklist,
    check_number_of_items,
    full_first,
    with_trailing_zero,
)
from sparseflash.blockmask import bitmask
from sparseflash.blockmask.cache import BoundedDict, MaskCache, bounded, mask_cache
from sparseflash.blockmask.csr import are_on_host, columns_of
from sparseflash.blockmask.transfer import to_device

T = TypeVar("T")

_MOST_PLANS = 64  # per mask, or for dense attention; a program with more shapes would not gain from the cache
_MOST_ENTRIES = 2**31 - 1  # one more would be an int64 argument of the kernels
_HOST_PLAN_ITEMS = 4096  # a plan with at most this many work items is made on the host
_DEVICES = ["cuda"]  # where kernels plan dynamic masks; tests add the CPU, for the interpreter


class MaskLists:
    """The tile lists of a mask over rows and columns, in the mask's own tiling and in others; shared by its plans."""

    def __init__(
        self, make: Callable[[int], TileLists], patterns: int, tokens: tuple[int, int], *, may_wait: bool,
        reusable: bool, device: torch.device, retiling: Retiling | None = None, pattern: Tensor | None = None,
        fused: bool = False,
    ) -> None:  # fmt: skip
        """make: returns the lists over rows (axis 0) or columns (axis 1) in the tiles of the mask.

        fused: plan by the kernels of fused.py; then nothing can be cut into chunks or retiled.
        """
        self._make = make
        self._made: list[TileLists | None] = [None, None]
        self.retiling = retiling  # None if the mask must be run in its own tiles
        self.patterns, self.tokens = patterns, tokens
        self.may_wait = may_wait  # whether the host may synchronise to read the lengths of the lists
        self.reusable = reusable  # False for a dynamic mask
        self.device = device
        self.pattern = pattern  # the mask's pattern numbers on the host, if the lists are on the host
        self.fused = fused

    def own(self, axis: int) -> TileLists:
        made = self._made[axis]
        if made is None:
            made = self._made[axis] = self._make(axis)
        return made

    def get(self, axis: int, tiling: Tiling | None) -> TileLists:
        own = self.own(axis)
        if tiling is None or tiling == own.tiling:
            return own
        if self.retiling is None:
            raise RuntimeError(f"this plan supports only the tiles of its mask; got {tiling}")
        return self.retiling.lists(axis, tiling)


class Plan:
    """The work of one mask for one batch size and number of heads."""

    def __init__(self, lists: MaskLists, pattern: Tensor, kv_heads: int, tiles_per_head: float) -> None:
        self.lists = lists
        self.pattern = pattern  # int32 [B, Hq]
        self.kv_heads = kv_heads
        self._worklists: dict[tuple[int, int, Tiling | None, int], Worklist] = {}
        self.tiles_per_head = tiles_per_head  # live tiles, mean over the patterns; capacity of a dynamic mask
        self.device = lists.device
        self._derived: dict[Any, Any] = {}

    def has_every_tile(self, block: tuple[int, int]) -> bool:
        """Whether all tiles of the mask, in blocks of this size, are live; False if that is not known on the host."""
        tiles = math.prod(-(-n // size) for n, size in zip(self.lists.tokens, block))
        return self.lists.reusable and self.tiles_per_head == tiles

    def filled(self, block: tuple[int, int], tile: tuple[int, int]) -> float:
        """The share of live tiles of size `tile` that the live blocks of the mask take, of size `block`; 0 if that is
        not known on the host. Synchronises with the device, once per mask.
        """
        retiling = self.lists.retiling
        if retiling is None or any(size % each for size, each in zip(tile, block, strict=True)):
            return 0.0
        united = retiling.count(0, Tiling(*tile)) * math.prod(tile)
        return self.tiles_per_head * self.lists.patterns * math.prod(block) / united if united else 0.0

    def tiling(self, axis: int, whole: Tile, gathered: Tile, cost: Cost, warps: Warps = usual_warps) -> Tiling | None:
        """The best tiling for a kernel over `axis` (0: rows, 1: columns), given the tiles that it prefers.

        None for the tiles of the mask.
        """
        retiling = self.lists.retiling
        return None if retiling is None else retiling.tiling(axis, whole, gathered, cost, warps)

    def worklist(self, axis: int, tile: int, tiling: Tiling | None = None, *, resident: int = 2) -> Worklist:
        """The work over tiles of `tile` queries (axis 0) or keys (axis 1); `tile` divides what the tiling holds.

        Over queries an item has one list; over keys it has one for each query head of the group that shares the key
        head. tiling: None for the tiles of the mask. resident: the number of programs that an SM runs at a time.
        """
        key = axis, tile, tiling, 0 if self.lists.fused else resident  # `resident` decides which items are cut
        found = self._worklists.get(key)
        if found is None:
            found = self._worklists[key] = self._made(self.lists.get(axis, tiling), axis, tile, resident)
        return found

    def derived(self, key: Any, make: Callable[[], T]) -> T:
        """The work in another form, with its own `ReadyEvent`; `make` is called once per key."""
        found: T | None = self._derived.get(key)
        if found is None:
            found = self._derived[key] = make()
        return found

    def _made(self, lists: TileLists, axis: int, tile: int, resident: int) -> Worklist:
        tokens = self.lists.tokens
        batch, heads = self.pattern.shape
        shape = (batch, heads, 1) if axis == 0 else (batch, self.kv_heads, heads // self.kv_heads)
        count = -(-tokens[axis] // tile)
        check_number_of_items(batch, shape[1], count)
        if self.lists.fused:
            lists.ready.wait()
            work = fused.work_in_start_order(lists, self.pattern, shape, tokens[axis], tile)
            return Worklist(work, lists.index, lists.tile, lists.words)
        pattern, on_host = self.pattern, self.lists.pattern
        if on_host is not None and batch * heads * count <= _HOST_PLAN_ITEMS:
            pattern = on_host.expand(batch, heads)
        else:
            lists = lists.to(self.device)
        lists.ready.wait()
        held, streamed, _ = lists.tiling
        group, splits = shape[-1], overrides().splits
        most = -(-tokens[1 - axis] // streamed) * group
        total = (len(lists.tile) - 1) * group * (held // tile) if self.lists.patterns == 1 else None
        of_call, parts, merged = pattern.reshape(shape), 0, None
        is_cut = may_be_cut(streamed, tile, resident, splits, most=most, total=total)
        if not is_cut and are_on_host(of_call, lists.start):
            work = host_plan.work_of(lists, of_call, tokens[axis], tile)
        else:
            items = _items(lists, of_call, tokens[axis], tile)
            cuts = cuts_of(
                items.size, count, streamed, tile, resident, splits,
                each=None if lists.each is None else lists.each * group, may_wait=self.lists.may_wait,
            ) if is_cut else None  # fmt: skip
            if cuts is not None:
                items, merged = cut_items(items, cuts)
                parts = cuts.parts
            work = _in_start_order(items, lists)
        made = Worklist(work, lists.index, lists.tile, lists.words, parts, merged)
        return made.to(self.device)


def plan_of(problem: Problem, q_heads: tuple[int, int], kv_heads: int, tokens: tuple[int, int]) -> Plan:
    """The plan of a problem for `q_heads = (batch, query heads)` and `tokens = (queries, keys)`, from the cache."""
    indices = problem.indices
    if indices is None:
        raise ValueError("problem must have a mask; use dense_plan for dense attention")
    cache = mask_cache(indices)
    plans = cache.get("plans")
    if plans is None:
        plans = cache["plans"] = BoundedDict(_MOST_PLANS)
    plan: Plan | None = plans.get((q_heads, kv_heads))
    if plan is None:
        if cache.may_wait:  # a dynamic mask may itself be made in the graph being recorded
            refuse_to_record(indices.device)
        lists: MaskLists | None = cache.get("lists")
        if lists is None:
            lists = cache["lists"] = _mask_lists(problem, tokens, cache)
        if problem.pattern is None:
            raise ValueError("all arrays of a mask must be given")
        tiles = len(indices) / lists.patterns
        plan = plans.put((q_heads, kv_heads), Plan(lists, problem.pattern.expand(q_heads), kv_heads, tiles))
    return plan


def _mask_lists(problem: Problem, tokens: tuple[int, int], cache: MaskCache) -> MaskLists:
    device = problem.indices.device  # type: ignore[union-attr]
    host = cache.get("host")
    source = problem if host is None else Problem.of(host, scale=problem.scale)
    indptr, indices, tile, words, pattern = source[:5]
    if indptr is None or indices is None or tile is None or words is None or pattern is None:
        raise ValueError("all arrays of a mask must be given")
    blocks = (problem.block_q, problem.block_k)
    row_blocks, col_blocks = [-(-n // b) for n, b in zip(tokens, blocks, strict=True)]
    # The cache, an attribute of the tensor `indices`, will hold the lists, so the lists must hold neither: the cycle
    # would keep all alive.
    indices, may_wait = indices.detach(), cache.may_wait
    # The words on the device, not the host's copy.
    own_words = aligned_start(words if problem.words is None else problem.words)
    by_kernels = not may_wait and device.type in _DEVICES and len(indices) < _MOST_ENTRIES and runs_kernels(device)
    list_tiles = fused.full_first if by_kernels else full_first
    patterns, both = (len(indptr) - 1) // row_blocks, (row_blocks, col_blocks)

    def make(axis: int) -> TileLists:
        if may_wait:
            refuse_to_record(device)
        arrays, tiling = (indptr, indices, tile), Tiling(*(blocks if axis == 0 else blocks[::-1]))
        if axis == 0:
            return list_tiles(*arrays, own_words, tiling)
        if by_kernels and fused.can_search(patterns, both):
            return fused.columns_full_first(*arrays, own_words, both, tiling)
        return list_tiles(*columns_of(*arrays, *both), own_words, tiling)

    return MaskLists(
        make, patterns, tokens, may_wait=may_wait, reusable=may_wait,
        device=device, pattern=None if host is None else pattern,
        retiling=Retiling(indptr, indices, tile, words, pattern, tokens, blocks) if may_wait else None,
        fused=by_kernels,
    )  # fmt: skip


@bounded(maxsize=_MOST_PLANS)
def dense_plan(
    q_heads: tuple[int, int], kv_heads: int, tokens: tuple[int, int], blocks: tuple[int, int], device: torch.device
) -> Plan:
    """The plan of a mask with every tile full; it stores nothing that grows with `Nq * Nk`."""
    refuse_to_record(device)
    (q_len, k_len), (block_q, block_k) = tokens, blocks
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)
    end_q, end_k = q_len - (row_blocks - 1) * block_q, k_len - (col_blocks - 1) * block_k
    cut = (
        (block_q, end_k),
        (end_q, block_k),
        (end_q, end_k),
    )  # tiles 1 to 3: the last column, the last row, the corner
    host = torch.device("cpu")
    (words,) = to_device(
        [torch.cat([bitmask.rectangle(block_q, block_k, *live, host) for live in cut]).view(-1)], device
    )
    last_col, last_row = (1 if end_k < block_k else 0), (2 if end_q < block_q else 0)

    def make(axis: int) -> TileLists:
        if axis == 0:
            return _dense_lists(row_blocks, col_blocks, last_col, last_row, words, Tiling(block_q, block_k))
        return _dense_lists(col_blocks, row_blocks, last_row, last_col, words, Tiling(block_k, block_q))

    lists = MaskLists(
        make, 1, tokens, may_wait=False, reusable=True, device=device,
        pattern=torch.zeros(1, 1, dtype=torch.int32, device="cpu"),
    )  # fmt: skip
    pattern = torch.zeros(q_heads, dtype=torch.int32, device=device)
    return Plan(lists, pattern, kv_heads, row_blocks * col_blocks)


def _dense_lists(rows: int, cols: int, last_col: int, last_row: int, words: Tensor, tiling: Tiling) -> TileLists:
    index = torch.arange(cols, dtype=torch.int32, device="cpu")
    tile = torch.zeros(2, cols, dtype=torch.int32, device="cpu")
    tile[0, -1] = last_col
    tile[1] = last_row
    tile[1, -1] = last_col + last_row
    start = torch.zeros(rows, dtype=torch.int32, device="cpu")
    start[-1] = cols
    full = torch.full((rows,), cols - (last_col > 0), dtype=torch.int32, device="cpu")
    if last_row:
        full[-1] = 0
    count = torch.full((rows,), cols, dtype=torch.int32, device="cpu")
    index, tile = with_trailing_zero(torch.cat([index, index])), with_trailing_zero(tile.view(-1))
    return TileLists(start, full, count, index, tile, words, tiling, cols)


def _items(lists: TileLists, pattern: Tensor, length: int, tile: int) -> Items:
    """The work items for `pattern [B, H, group]`, ordered by number: W = B * H * T."""
    group, device = pattern.shape[-1], pattern.device
    count_tiles = -(-length // tile)
    block = lists.tiling.held
    block_row = torch.arange(count_tiles, dtype=torch.int32, device=device)  # [T]
    if tile != block:
        block_row = block_row * tile // block
    first_row = pattern * -(-length // block)
    row = (first_row.unsqueeze(2) + block_row[:, None]).view(-1)  # [B, H, T, group]
    start, full, count = [x.index_select(0, row).view(-1, group) for x in (lists.start, lists.full, lists.count)]
    number = torch.arange(len(start), device=device, dtype=torch.int32).unsqueeze(1).expand(-1, group)
    return Items(number, start, full, count, torch.zeros_like(start))


def _in_start_order(items: Items, lists: TileLists) -> Tensor:
    """The items as the kernels read them: int32 `[W, group, ITEM]`, in the order in which programs start."""
    start, masked = items.start.view(-1), (items.start + items.full).view(-1)
    index = lists.index.view(len(lists.tile), -1)[:, 0]  # kernels do not read this block for gathered tiles
    work = WorkItem(
        number=items.number, start=items.start, full=items.full, count=items.size, part=items.part,
        full_block=index.index_select(0, start).view_as(items.start),
        partial_block=index.index_select(0, masked).view_as(items.start),
        partial_tile=lists.tile.index_select(0, masked).view_as(items.start),
    )  # fmt: skip
    return torch.stack(work, dim=-1).index_select(0, start_order(items.size.sum(1)))

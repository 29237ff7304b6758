"""One rank's work: the exchanges of keys, and the attention to the keys of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.cache import once
from sparseflash.distributed.costs import FEW_QUERIES
from sparseflash.distributed.entries import Entries
from sparseflash.distributed.planner import Assignment
from sparseflash.distributed.positions import Positions
from sparseflash.distributed.routes import Booleans, Heads, Readers
from sparseflash.distributed.rows import Additions, Rows
from sparseflash.distributed.shards import Integers, in_blocks


@dataclass(frozen=True, eq=False)
class Stage:
    """An attention of some queries to some keys, and the exchange of keys before it.

    The first keys are `kept` slots with keys of this rank, filled up to whole blocks; then come keys of other ranks.

    `mask`: on the CPU; `queries`: the numbers of the rank's queries, int64, None for all; `exchanges`: whether any rank
    sends anything; `own`: the rows of the rank's keys that come first, of `[B * Hkv * n, D]`; `slots`: tokens of all
    keys; `positions` (None if a slot has different tokens in different heads), `query_positions`: in the whole
    sequence, arbitrary for unused slots; `between`: int64 `[from, to]`, the rows between all ranks, counted when first
    called.
    """

    mask: BlockMask
    exchanges: bool
    sent: Rows
    received: Rows
    own: Rows
    kept: int
    slots: int
    positions: Positions | None
    query_positions: Positions
    queries: Tensor | None = None
    between: Callable[[], Integers] = lambda: np.zeros((1, 1), np.int64)

    @cached_property
    def _moved(self) -> dict[Any, Any]:
        return {}

    def mask_on(self, device: torch.device) -> BlockMask:
        return once(self._moved, ("mask", device), lambda: self.mask.to(device))

    def queries_on(self, device: torch.device) -> Tensor | None:
        queries = self.queries
        return None if queries is None else once(self._moved, ("queries", device), lambda: queries.to(device))


@dataclass(frozen=True, eq=False)
class Route:
    """The stages of a rank in their order, and the gradients that are added to its keys' after them."""

    stages: list[Stage]

    @cached_property
    def exchanging(self) -> list[Stage]:
        return [stage for stage in self.stages if stage.exchanges]

    @cached_property
    def added(self) -> Additions:
        """Adds gradients of keys that exchanging stages kept, and gradients that come back for keys that were sent."""
        return Additions([rows for stage in self.exchanging for rows in (stage.own, stage.sent)])


def stages_of(
    mask: BlockMask, assignment: Assignment, readers: Readers, rank: int, heads: Heads, stages: int, *,
    same_slots: bool, local_first: bool = False,
) -> Route:  # fmt: skip
    """The attention to local keys, then `stages` exchanges of nearly equal parts of each message.

    If `stages` is 0, all queries attend to all their keys at once. If few have remote keys, the others attend apart, to
    local keys; with `local_first` they attend first, while keys travel.

    same_slots: a slot has the same token for all heads. Otherwise heads that need different keys fill their slots
    independently, which takes less memory.
    """
    work = _Work.of(mask, assignment, readers, rank, heads, max(stages, 1))
    if stages == 0 and any(readers.remote(each).any() for each in range(readers.ranks)):
        together = work.together(same_slots)
        return Route(together[::-1] if local_first else together)
    return Route([work.local(), *(work.exchange(stage, same_slots) for stage in range(stages))])


@dataclass(frozen=True, eq=False)
class _Work:
    mask: BlockMask
    assignment: Assignment
    readers: Readers
    rank: int
    heads: Heads
    entries: Entries
    outgoing: list[Integers]  # the key blocks that each rank needs from this one
    incoming: list[Integers]  # the key blocks that this rank needs from each
    reads: Booleans  # [R, kinds, Mk]
    stages: int
    stage_of: Integers  # [Mk]: 0 is local, from 1 on comes with an exchange, -1 is not needed

    @classmethod
    def of(
        cls, mask: BlockMask, assignment: Assignment, readers: Readers, rank: int, heads: Heads, stages: int
    ) -> _Work:
        stage_of = np.full(mask.blocks[1], -1)
        stage_of[readers.owner == rank] = 0
        incoming = [readers.message(other, rank) for other in range(readers.ranks)]
        for blocks in incoming:
            stage_of[blocks] = 1 + _parts(len(blocks), stages)
        return cls(
            mask, assignment, readers, rank, heads, Entries.of(mask, assignment, rank, heads),
            [readers.message(rank, other) for other in range(readers.ranks)], incoming,
            readers.reads_of(heads), stages, stage_of,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        return self.assignment.keys.counts[self.rank]

    @cached_property
    def place(self) -> Integers:
        """The number of each key block among the blocks of its rank, for each kind of head: `[kinds, Mk]`."""
        return np.broadcast_to(self.readers.place, (len(self.heads.kinds), len(self.readers.place)))

    @cached_property
    def query_positions(self) -> Positions:
        queries = self.assignment.queries
        return Positions(queries.positions(self.rank), queries.length)

    @cached_property
    def key_positions(self) -> Positions:
        keys = self.assignment.keys
        return Positions(keys.positions(self.rank), keys.length)

    def local(self, rows: Booleans | None = None) -> Stage:
        mask = self.entries.mask(self.stage_of == 0, self.place, self.tokens, rows)
        none = _none(self.readers.ranks)
        return Stage(
            mask, False, none, none, none, self.tokens, self.tokens, self.key_positions, self.query_positions
        )  # fmt: skip

    def exchange(self, number: int, same_slots: bool) -> Stage:
        slot, slots = self._slots(number, same_slots, 1)
        mask = self.entries.mask(self.stage_of == number + 1, slot, slots * self.mask.block_k)
        return Stage(
            mask, True, *self._messages(number, slot, slots), _none(self.readers.ranks), 0, slots * self.mask.block_k,
            self._positions(number, same_slots, slots), self.query_positions, between=self._between(number),
        )  # fmt: skip

    def together(self, same_slots: bool) -> list[Stage]:
        """The attention of block rows to all their keys; if few have remote keys, then of the others.

        The others attend first only if the exchange needs no multiprocessors. A collective started after attention
        waits until attention ends; started before, it blocks attention while it waits for the other rank.
        """
        block_q, block_k = self.mask.block_q, self.mask.block_k
        rows = self.entries.rows_with(self.stage_of > 0)
        if not rows.any():
            rows[-1] = True  # so that keys are sent in some stage
        if rows.mean() > FEW_QUERIES:
            rows[:] = True
        own = self.entries.columns_of(rows) & (self.stage_of == 0)
        first = int(own.sum())
        slot, slots = self._slots(0, same_slots, 0 if first else 1)
        sent, received = self._messages(0, slot, slots)
        slot = np.where(own, own.cumsum() - 1, first + slot)
        mask = self.entries.mask(self.stage_of >= 0, slot, (first + slots) * block_k, rows, cut=True)
        queries = None if rows.all() else torch.from_numpy(in_blocks(np.flatnonzero(rows), block_q))
        query_positions = self.query_positions
        if queries is not None:
            queries = queries[queries < self.entries.q_len]
            query_positions = Positions(query_positions.tokens[queries], query_positions.length)
        positions = self._positions(0, same_slots, slots)
        if positions is not None:
            kept = torch.from_numpy(in_blocks(np.flatnonzero(own), block_k))
            positions = Positions(torch.cat([kept, positions.tokens]), positions.length)
        stage = Stage(
            mask, True, sent, received, self._rows([np.flatnonzero(own)], [own[None]], self.place, self.tokens),
            first * block_k, (first + slots) * block_k, positions, query_positions, queries, self._between(0),
        )  # fmt: skip
        return [stage] if queries is None else [stage, self.local(~rows)]

    def _needed(self, number: int, same_slots: bool) -> Booleans:
        """Which key blocks come with an exchange, for each kind of head: `[kinds, Mk]`."""
        here = self.reads[self.rank] & (self.stage_of == number + 1)
        return np.broadcast_to(here.any(0), here.shape) if same_slots else here

    def _slots(self, number: int, same_slots: bool, least: int) -> tuple[Integers, int]:
        """The block number at which each of these blocks is placed, `[kinds, Mk]`, and the number of blocks."""
        needed = self._needed(number, same_slots)
        return needed.cumsum(1) - 1, max(least, int(needed.sum(1).max()))

    def _positions(self, number: int, same_slots: bool, slots: int) -> Positions | None:
        needed = self._needed(number, same_slots)
        if (needed != needed[0]).any():
            return None
        blocks = np.zeros(slots, np.int64)
        some = np.flatnonzero(needed[0])
        blocks[: len(some)] = some
        return Positions(torch.from_numpy(in_blocks(blocks, self.mask.block_k)), self.mask.k_len)

    def _messages(self, number: int, slot: Integers, slots: int) -> tuple[Rows, Rows]:
        outgoing, incoming = (
            [_part(each, self.stages, number) for each in some] for some in (self.outgoing, self.incoming)
        )
        wanted = [self.reads[self.rank]] * self.readers.ranks
        return (
            self._rows(outgoing, list(self.reads), self.place, self.tokens),
            self._rows(incoming, wanted, slot, slots * self.mask.block_k),
        )

    def _between(self, number: int) -> Callable[[], Integers]:
        """A function that counts the rows between all ranks in an exchange; not every transport calls it."""
        # Without `self`, so that the lists of tiles are not kept with the stage.
        return cache(partial(_rows_between, self.readers, self.heads, self.stages, number))

    def _rows(self, blocks: list[Integers], wanted: list[Booleans], first: Integers, width: int) -> Rows:
        """The rows of blocks for each rank, where a kind of head wants them.

        `wanted`: bool `[kinds or 1, Mk]` for each rank; `first [kinds, Mk]`: block numbers; `width`: tokens of a head.
        """
        starts, lengths, counts = [], [], []
        kinds = self.heads.kind_of_pair
        for some, need in zip(blocks, wanted, strict=True):
            pair, place = np.broadcast_to(need[:, some], (len(self.heads.kinds), len(some)))[kinds].nonzero()
            block = some[place]
            starts.append(pair * width + first[kinds[pair], block] * self.mask.block_k)
            lengths.append(self.readers.sizes[block])
            counts.append(int(lengths[-1].sum()))
        return Rows(np.concatenate(starts), np.concatenate(lengths), counts)


def _rows_between(readers: Readers, heads: Heads, stages: int, number: int) -> Integers:
    """The rows that go between ranks in one of the exchanges, `[from, to]`."""
    ranks, between = range(readers.ranks), np.zeros((readers.ranks, readers.ranks), np.int64)
    for target in ranks:
        rows = readers.rows_of(target, heads)
        between[:, target] = [rows[_part(readers.message(source, target), stages, number)].sum() for source in ranks]
    return between


def _part(blocks: Integers, stages: int, number: int) -> Integers:
    return np.compress(_parts(len(blocks), stages) == number, blocks)


def _none(ranks: int) -> Rows:
    return Rows(np.zeros(0, np.int64), np.zeros(0, np.int64), [0] * ranks)


def _parts(count: int, parts: int) -> Integers:
    return np.arange(count) * parts // max(count, 1)

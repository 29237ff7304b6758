"""From a mask and its shards to one rank's work: which key blocks travel when, and the mask of each stage.

Every rank computes the same table of who reads what from the whole mask, and takes from it what it sends and what it
receives; so the two ends of each message agree without talking. All of this is NumPy on lists of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.build import arrays_of_tiles
from sparseflash.blockmask.stats import pattern_count
from sparseflash.distributed.planner import Assignment
from sparseflash.distributed.positions import Positions
from sparseflash.distributed.shards import Integers

Booleans = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a tensor `[batch * heads * tokens, ...]`, as runs, for each rank that they are exchanged with.

    `starts`, `sizes`: int64 `[runs]`, the first row and the number of rows of each run, those of rank 0 first;
    `counts`: rows for each rank.
    """

    starts: Integers
    sizes: Integers
    counts: list[int]
    _made: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)  # one entry for each device in use

    @cached_property
    def are_in_order(self) -> bool:
        """Whether these are rows 0, 1, 2 and so on, without a gap."""
        return bool((self.starts == self.sizes.cumsum() - self.sizes).all())

    def taken(self, x: Tensor) -> Tensor:
        """The rows of `x [rows, ...]`; x itself if they are all of it, in their order."""
        return x if self.are_all(len(x)) else x.index_select(0, self.on(x.device))

    def placed(self, values: Tensor, count: int) -> Tensor:
        """A tensor of `count` rows with these values in these rows and zeros elsewhere; the inverse of `taken`."""
        if self.are_all(count):
            return values
        return values.new_zeros((count, *values.shape[1:])).index_copy_(0, self.on(values.device), values)

    def are_all(self, count: int) -> bool:
        """Whether these are all of so many rows, in their order."""
        return sum(self.counts) == count and self.are_in_order

    def on(self, device: torch.device) -> Tensor:
        """The numbers of the rows, int64 `[sum(counts)]`, made once for each device."""
        rows = self._made.get(device)
        if rows is None:
            sizes = torch.from_numpy(self.sizes).to(device)
            shift = torch.from_numpy(self.starts - (self.sizes.cumsum() - self.sizes)).to(device)
            total = sum(self.counts)
            rows = torch.repeat_interleave(shift, sizes, output_size=total) + torch.arange(total, device=device)
            self._made[device] = rows
        return rows


@dataclass(frozen=True, eq=False)
class Stage:
    """An attention to some keys, and the exchange before it that brings those of other ranks.

    `mask`: of the rank's queries and of the keys of this stage, on the CPU; `slots`: tokens of these keys, of which the
    first `local` are the rank's own, filled up to whole blocks, and the others come from other ranks; `exchanges`:
    whether any rank sends anything; `positions`: where in the whole sequence the token in each slot stands, any
    position for unused slots; None if heads differ in what lies in a slot.
    """

    mask: BlockMask
    exchanges: bool
    sent: Rows
    received: Rows
    local: int
    slots: int
    positions: Positions | None

    @cached_property
    def _moved(self) -> dict[torch.device, BlockMask]:
        return {}

    def mask_on(self, device: torch.device) -> BlockMask:
        """The mask on a device, moved there once."""
        if device not in self._moved:
            self._moved[device] = self.mask.to(device)
        return self._moved[device]


@dataclass(frozen=True, eq=False)
class Readers:
    """Who reads what. `reads`: bool `[ranks, P, Mk]`: whether a rank has queries with live scores in a key block."""

    reads: Booleans
    owner: Integers  # [Mk], the rank of each key block
    place: Integers  # [Mk], its number among the blocks of its rank

    @classmethod
    def of(cls, mask: BlockMask, assignment: Assignment, ranks: int) -> Readers:
        """Reads the lists of a canonical mask on the CPU once."""
        col_blocks, patterns = mask.blocks[1], pattern_count(mask)
        first = assignment.queries.rank_of_block(mask.block_q) * patterns  # [Mq]
        row_table = (first + np.arange(patterns)[:, None]).reshape(-1) * col_blocks
        reads = np.zeros(ranks * patterns * col_blocks, dtype=np.bool_)
        reads[row_table.repeat(np.diff(mask.indptr.numpy())) + mask.indices.numpy()] = True
        keys = assignment.keys
        return cls(
            reads.reshape(ranks, patterns, col_blocks),
            keys.rank_of_block(mask.block_k), keys.place_of_block(mask.block_k),
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.reads)

    def remote(self, rank: int) -> Booleans:
        """Whether a rank needs each key block from another, for any head: bool `[Mk]`."""
        needed: Booleans = self.reads[rank].any(0) & (self.owner != rank)
        return needed

    def message(self, source: int, target: int) -> Integers:
        """The key blocks that `target` needs from `source` for any head, ascending."""
        mine = np.flatnonzero(self.owner == source) if source != target else np.zeros(0, np.int64)
        wanted: Booleans = self.reads[target][:, mine].any(0)
        return np.compress(wanted, mine)


@dataclass(frozen=True, eq=False)
class Heads:
    """Which patterns the queries of each key head use. With grouped heads, a key head is needed where any of its query
    heads needs it. Key heads with the same patterns are of one kind.
    """

    kinds: list[list[int]]  # the patterns of each kind
    kind_of_pair: Integers  # [B * Hkv]
    combinations: list[tuple[int, int]]  # distinct (kind, pattern), in order of first appearance
    number: Integers  # [B or 1, Hq or 1]: the combination of each query head

    @classmethod
    def of(cls, pattern: Tensor, batch: int, kv_heads: int) -> Heads:
        """`pattern`: the mask's, `[B or 1, Hq or 1]`."""
        if pattern.shape[1] > 1 and pattern.shape[1] % kv_heads:
            raise ValueError(f"kv_heads must divide the {pattern.shape[1]} heads of the mask; got {kv_heads}.")
        numbers = pattern.tolist()
        groups = kv_heads if pattern.shape[1] > 1 else 1
        size = pattern.shape[1] // groups
        kinds: dict[tuple[int, ...], int] = {}
        combinations: dict[tuple[int, int], int] = {}
        kind_of, number = [], []
        for row in numbers:
            sets = [tuple(sorted(set(row[g * size : (g + 1) * size]))) for g in range(groups)]
            kind_of.append([kinds.setdefault(patterns, len(kinds)) for patterns in sets])
            pairs = [(kind_of[-1][h // size], p) for h, p in enumerate(row)]
            number.append([combinations.setdefault(pair, len(combinations)) for pair in pairs])
        of_pair = np.broadcast_to(np.array(kind_of), (batch, kv_heads)).reshape(-1)
        return cls([list(kind) for kind in kinds], of_pair, list(combinations), np.array(number))


def stages_of(
    mask: BlockMask, assignment: Assignment, readers: Readers, rank: int, heads: Heads, stages: int, *,
    same_slots: bool,
) -> list[Stage]:  # fmt: skip
    """The attention to local keys, then `stages` exchanges. Each message is cut into that many nearly equal parts. If
    `stages` is 0, there is one attention, to local keys and all others together.

    same_slots: a slot has the same token for all heads, so that it has one position; otherwise heads that need
    different keys each fill their slots from the first on, which takes less memory.
    """
    ranks, block_k = readers.ranks, mask.block_k
    reads = np.stack([readers.reads[:, kind].any(1) for kind in heads.kinds], axis=1)  # [R, kinds, Mk]
    sizes = np.full(mask.blocks[1], block_k)
    sizes[-1] -= mask.blocks[1] * block_k - mask.k_len
    tokens = assignment.keys.counts[rank]
    outgoing = [readers.message(rank, other) for other in range(ranks)]
    incoming = [readers.message(other, rank) for other in range(ranks)]
    travelling = bool(any(readers.remote(each).any() for each in range(ranks)))
    together = stages == 0 and travelling
    stage_of = np.full(mask.blocks[1], -1)  # of each key block on this rank: 0 is local, -1 is not needed
    stage_of[readers.owner == rank] = 0
    for blocks in incoming:
        stage_of[blocks] = 1 + _parts(len(blocks), max(stages, 1))
    local_columns = np.broadcast_to(readers.place, (len(heads.kinds), len(readers.place)))
    entries = _Entries.of(mask, assignment, rank, heads)
    own_tokens = assignment.keys.positions(rank)
    local = Positions(own_tokens, assignment.keys.length)
    made = []
    if not together:
        nothing = Rows(np.zeros(0, np.int64), np.zeros(0, np.int64), [0] * ranks)
        of_local = entries.mask(stage_of == 0, local_columns, tokens)
        made.append(Stage(of_local, False, nothing, nothing, tokens, tokens, local))
    for stage in range(1 if together else stages):
        here = reads[rank] & (stage_of == stage + 1)  # [kinds, Mk]
        filled = np.broadcast_to(here.any(0), here.shape) if same_slots else here
        slot = filled.cumsum(1) - 1
        slots = max(0 if together else 1, int(filled.sum(1).max()))
        positions = _positions(filled[0], slots, mask) if (filled == filled[0]).all() else None

        def run(blocks: list[Integers], wanted: list[Booleans], first: Integers, width: int) -> Rows:
            """The rows of the blocks of each message; `first [kinds, Mk]`: block numbers, `width`: tokens a head."""
            starts, lengths, counts = [], [], []
            for some, need in zip(blocks, wanted, strict=True):
                pair, place = need[:, some][heads.kind_of_pair].nonzero()
                block = some[place]
                starts.append(pair * width + first[heads.kind_of_pair[pair], block] * block_k)
                lengths.append(sizes[block])
                counts.append(int(lengths[-1].sum()))
            return Rows(np.concatenate(starts), np.concatenate(lengths), counts)

        def part_of(blocks: Integers, stage: int = stage) -> Integers:
            return np.compress(_parts(len(blocks), max(stages, 1)) == stage, blocks)

        sent = run([part_of(blocks) for blocks in outgoing], list(reads), local_columns, tokens)
        received = run([part_of(blocks) for blocks in incoming], [reads[rank]] * ranks, slot, slots * block_k)
        own = 0
        if together:
            own = -(-tokens // block_k)
            slot = np.where(stage_of == 0, local_columns, own + slot)
            if positions is not None:
                unused = own_tokens[-1] + 1 + torch.arange(own * block_k - tokens)
                joined = torch.cat([own_tokens, unused, positions.tokens])
                positions = Positions(joined, assignment.keys.length)
        columns = stage_of >= 0 if together else stage_of == stage + 1
        count = (own + slots) * block_k
        made.append(Stage(entries.mask(columns, slot, count), True, sent, received, own * block_k, count, positions))
    return made


def _positions(filled: Booleans, slots: int, mask: BlockMask) -> Positions:
    """The positions of the tokens of these key blocks, one after another; any in what is left of `slots` blocks."""
    first = np.zeros(slots, np.int64)
    blocks = np.flatnonzero(filled)
    first[: len(blocks)] = blocks * mask.block_k
    tokens = (first[:, None] + np.arange(mask.block_k)).reshape(-1)
    return Positions(torch.from_numpy(tokens), mask.k_len)


def _parts(count: int, parts: int) -> Integers:
    """The part that each of `count` items belongs to, in order and of nearly equal sizes."""
    return np.arange(count) * parts // max(count, 1)


@dataclass(frozen=True, eq=False)
class _Entries:
    """The stored tiles of a rank's block rows, for each combination of patterns."""

    whole: BlockMask
    q_len: int
    row: Integers  # combination * Mq of the rank + block row of the rank
    kind: Integers  # the kind of key heads
    col: Integers
    tile: Integers
    heads: Heads

    @classmethod
    def of(cls, mask: BlockMask, assignment: Assignment, rank: int, heads: Heads) -> _Entries:
        mine = np.flatnonzero(assignment.queries.rank_of_block(mask.block_q) == rank)
        patterns = np.array([pattern for _, pattern in heads.combinations])
        kinds = np.array([kind for kind, _ in heads.combinations])
        flat = (patterns[:, None] * mask.blocks[0] + mine).reshape(-1)
        indptr = mask.indptr.numpy().astype(np.int64)
        counts = indptr[flat + 1] - indptr[flat]
        row = np.arange(len(flat)).repeat(counts)
        entry = np.arange(len(row)) + (indptr[flat] - (counts.cumsum() - counts))[row]
        col, tile = mask.indices.numpy()[entry].astype(np.int64), mask.tile.numpy()[entry].astype(np.int64)
        return cls(mask, assignment.queries.counts[rank], row, kinds[row // len(mine)], col, tile, heads)

    def mask(self, columns: Booleans, place: Integers, k_len: int) -> BlockMask:
        """The mask of these key blocks, whose new numbers are `place [kinds, Mk]`."""
        chosen = columns[self.col]
        row, kind, col, tile = self.row[chosen], self.kind[chosen], self.col[chosen], self.tile[chosen]
        block_q, block_k = self.whole.block_q, self.whole.block_k
        rows, cols, tiles, number = (torch.from_numpy(x) for x in (row, place[kind, col], tile, self.heads.number))
        arrays = arrays_of_tiles(
            self.q_len, k_len, block_q, block_k, rows, cols, tiles, self.whole.bits, number,
            len(self.heads.combinations),
        )  # fmt: skip
        return BlockMask(self.q_len, k_len, block_q, block_k, *arrays)

"""The key blocks that each rank needs from each other rank, computed from a mask and its shards alike on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.stats import pattern_count
from sparseflash.distributed.planner import Assignment
from sparseflash.distributed.shards import Integers

Booleans = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Readers:
    """The readers of keys. `reads`: bool `[ranks, P, Mk]`: whether a rank has queries with live scores
    in a key block.
    """

    reads: Booleans
    owner: Integers  # [Mk], the rank of each key block
    place: Integers  # [Mk], its number among the blocks of its rank
    sizes: Integers  # [Mk], its tokens

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
            keys.rank_of_block(mask.block_k), keys.place_of_block(mask.block_k), keys.size_of_block(mask.block_k),
        )  # fmt: skip

    @property
    def ranks(self) -> int:
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

    def reads_of(self, heads: Heads, ranks: slice = slice(None)) -> Booleans:
        """Whether ranks need a key block for each kind of key head: bool `[ranks, kinds, Mk]`."""
        return np.stack([self.reads[ranks, kind].any(1) for kind in heads.kinds], axis=1)

    def rows_of(self, rank: int, heads: Heads) -> Integers:
        """The rows that a rank needs of each key block: pairs of a token and a key head of a batch element, `[Mk]`."""
        (reads,) = self.reads_of(heads, slice(rank, rank + 1))
        rows: Integers = (reads * heads.uses[:, None]).sum(0) * self.sizes
        return rows


@dataclass(frozen=True, eq=False)
class Heads:
    """The patterns of each key head's queries: with grouped heads, a key head is needed where any of its query heads
    needs it. Key heads with the same patterns are of one kind."""

    kinds: list[list[int]]  # the patterns of each kind
    kind_of_pair: Integers  # [B * Hkv]
    combinations: list[tuple[int, int]]  # distinct (kind, pattern), in order of first appearance
    number: Integers  # [B or 1, Hq or 1]: the combination of each query head

    @cached_property
    def uses(self) -> Integers:
        """How many pairs of a batch element and a key head are of each kind: `[kinds]`."""
        return np.bincount(self.kind_of_pair, minlength=len(self.kinds))

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

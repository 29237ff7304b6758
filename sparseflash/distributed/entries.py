"""The live tiles of one rank's queries; the masks of the rank's attentions are made from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.build import arrays_of_tiles
from sparseflash.blockmask.csr import take_rows
from sparseflash.distributed.planner import Assignment
from sparseflash.distributed.routes import Booleans, Heads
from sparseflash.distributed.shards import Integers


@dataclass(frozen=True, eq=False)
class Entries:
    """The stored tiles of a rank's block rows, for each combination of patterns."""

    whole: BlockMask
    q_len: int
    row: Integers  # combination * Mq of the rank + block row of the rank
    kind: Integers  # the kind of key heads
    col: Integers
    tile: Integers
    heads: Heads

    @classmethod
    def of(cls, mask: BlockMask, assignment: Assignment, rank: int, heads: Heads) -> Entries:
        mine = np.flatnonzero(assignment.queries.rank_of_block(mask.block_q) == rank)
        patterns = np.array([pattern for _, pattern in heads.combinations])
        kinds = np.array([kind for kind, _ in heads.combinations])
        flat = (patterns[:, None] * mask.blocks[0] + mine).reshape(-1)
        row, entry = (x.numpy() for x in take_rows(mask.indptr, torch.from_numpy(flat)))
        col, tile = mask.indices.numpy()[entry].astype(np.int64), mask.tile.numpy()[entry].astype(np.int64)
        kind = kinds[row // len(mine)] if len(heads.kinds) > 1 else np.broadcast_to(kinds[:1], row.shape)
        return cls(mask, assignment.queries.counts[rank], row, kind, col, tile, heads)

    @property
    def block_rows(self) -> int:
        return -(-self.q_len // self.whole.block_q)

    def rows_with(self, columns: Booleans) -> Booleans:
        found = np.zeros(self.block_rows, np.bool_)
        found[self.row[columns[self.col]] % self.block_rows] = True
        return found

    def columns_of(self, rows: Booleans) -> Booleans:
        found = np.zeros(self.whole.blocks[1], np.bool_)
        found[self.col[rows[self.row % self.block_rows]]] = True
        return found

    def mask(
        self, columns: Booleans, place: Integers, k_len: int, rows: Booleans | None = None, *, cut: bool = False
    ) -> BlockMask:
        """The mask of these block rows and these key blocks, whose new numbers are `place [kinds, Mk]`. cut: drop the
        other block rows.
        """
        chosen, q_len, count = columns[self.col], self.q_len, self.block_rows
        if rows is not None:
            chosen = chosen & rows[self.row % count]
        row, col, tile = self.row[chosen], self.col[chosen], self.tile[chosen]
        placed = place[0][col] if len(place) == 1 else place[self.kind[chosen], col]
        block_q, block_k = self.whole.block_q, self.whole.block_k
        if rows is not None and cut:
            left = int(rows.sum())
            row = row // count * left + (rows.cumsum() - 1)[row % count]
            q_len = left * block_q - (count * block_q - q_len if rows[-1] else 0)
        rows_, cols, tiles, number = (torch.from_numpy(x) for x in (row, placed, tile, self.heads.number))
        arrays = arrays_of_tiles(
            q_len, k_len, block_q, block_k, rows_, cols, tiles, self.whole.bits, number, len(self.heads.combinations)
        )
        return BlockMask(q_len, k_len, block_q, block_k, *arrays)

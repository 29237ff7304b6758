"""Makes the lists of a mask in other tilings, each on first use, and counts their tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflash.backends.triton.schedule.gather import gathered_keys, gathered_queries
from sparseflash.backends.triton.schedule.tilings import Cost, Tile, Tiling, Warps, candidates, choose, usual_warps
from sparseflash.backends.triton.schedule.worklists import TileLists, full_first
from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.cache import once
from sparseflash.blockmask.csr import are_on_host, row_of_entry


class Retiling:
    """`axis` is 0 for lists over rows, which hold queries and stream keys, and 1 for lists over columns."""

    def __init__(
        self, indptr: Tensor, indices: Tensor, tile: Tensor, words: Tensor, pattern: Tensor, lengths: tuple[int, int],
        block: tuple[int, int],
    ) -> None:  # fmt: skip
        self._arrays = indptr, indices, tile  # `indices` is detached: this is cached on the mask's own `indices`
        self._words, self._pattern = words, pattern
        self._lengths, self._block = lengths, block
        self._made: dict[Any, Any] = {}

    def lists(self, axis: int, tiling: Tiling) -> TileLists:
        return once(self._made, ("lists", axis, tiling), lambda: self._lists(axis, tiling))

    def tiling(self, axis: int, whole: Tile, gathered: Tile, cost: Cost, warps: Warps = usual_warps) -> Tiling:
        found = self.candidates(axis, whole, gathered)
        if len(found) == 1:
            return found[0]
        return choose(found, lambda each: self.count(axis, each), self.held(axis), whole, gathered, cost, warps)

    def candidates(self, axis: int, whole: Tile, gathered: Tile) -> list[Tiling]:
        return candidates((self._block[axis], self._block[1 - axis]), whole, gathered)

    def held(self, axis: int) -> int:
        """The total number of tokens that programs over this axis hold, over all patterns."""
        patterns = (len(self._arrays[0]) - 1) // -(-self._lengths[0] // self._block[0])
        return patterns * self._lengths[axis]

    def count(self, axis: int, tiling: Tiling) -> int:
        return once(self._made, ("count", axis, tiling), lambda: self._count(axis, tiling))

    def _count(self, axis: int, tiling: Tiling) -> int:
        indptr, indices, _ = self._arrays
        blocks = [-(-n // b) for n, b in zip(self._lengths, self._block, strict=True)]
        if are_on_host(indptr, indices):
            xp: Any = np
            rows: Any = indptr.numpy()[1:].searchsorted(np.arange(len(indices)), side="right")
            place: Any = (rows % blocks[0], indices.numpy())
        else:
            xp = torch
            rows = row_of_entry(indptr, len(indices))
            place = rows % blocks[0], indices.long()
        held = rows // blocks[0] * blocks[axis] + place[axis] // (tiling.held // self._block[axis])
        streamed = place[1 - axis] // ((tiling.gathered or tiling.streamed) // self._block[1 - axis])
        found = xp.unique(held * blocks[1 - axis] + streamed)
        if not tiling.gathered:
            return len(found)
        each = xp.bincount(found // blocks[1 - axis])
        return int((-(-each // (tiling.streamed // tiling.gathered))).sum())

    def _lists(self, axis: int, tiling: Tiling) -> TileLists:
        streamed = tiling.gathered or tiling.streamed
        block = (tiling.held, streamed) if axis == 0 else (streamed, tiling.held)
        mask = once(self._made, ("mask", block), lambda: self._mask().reblock(block))
        if tiling.gathered:
            return (gathered_keys, gathered_queries)[axis](mask, tiling.streamed)
        arrays = (mask.indptr, mask.indices, mask.tile) if axis == 0 else mask.columns
        return full_first(*arrays, mask.words, tiling)

    def _mask(self) -> BlockMask:
        block_q, block_k = self._block
        bits = self._words.view(-1, block_q, bitmask.words_per_row(block_k))
        if not bool((self._arrays[2] > 0).any()):  # no partial tile; the words are one unused dead tile
            bits = bits[:0]
        return BlockMask(*self._lengths, block_q, block_k, *self._arrays, bits, self._pattern)

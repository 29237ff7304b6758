"""The live tiles of a mask in other block sizes: the cost of larger or smaller tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import BLOCKS, Block, block_pair
from sparseflash.blockmask.build import SCORES_AT_ONCE
from sparseflash.blockmask.walks import Walk, walks


@dataclass(frozen=True)
class Coarsening:
    """A mask in blocks of `block_q x block_k`: its live tiles, over all heads and batch elements of `mask.shape`.

    >>> print(Coarsening(block_q=64, block_k=64, live_tiles=10, live_scores=20_480))
    blocks of 64: 10 live tiles, 2 computed per live score
    """

    block_q: int
    block_k: int
    live_tiles: int
    live_scores: int

    @property
    def computed_scores(self) -> int:
        """Scores of the live tiles: `live_tiles * block_q * block_k`."""
        return self.live_tiles * self.block_q * self.block_k

    @property
    def over_coverage(self) -> float:
        """Computed scores per live score; 1.0 is no waste, also without live scores."""
        return self.computed_scores / self.live_scores if self.live_scores else 1.0

    def __str__(self) -> str:
        block = f"{self.block_q}" if self.block_q == self.block_k else f"{self.block_q} x {self.block_k}"
        tiles = f"{self.live_tiles:,} live tile{'' if self.live_tiles == 1 else 's'}"
        return f"blocks of {block}: {tiles}, {self.over_coverage:.4g} computed per live score"


def coarsening(mask: BlockMask, blocks: Sequence[Block] = BLOCKS) -> list[Coarsening]:
    """The live tiles of the mask in other block sizes, one entry for each of `blocks`: tokens, or `(block_q, block_k)`
    pairs.

    >>> near = BlockMask.from_function(lambda q, k: (q - k).abs() <= 8, 1024, block=64)
    >>> for entry in coarsening(near, (16, 64, 256)):
    ...     print(entry)
    blocks of 16: 190 live tiles, 2.806 computed per live score
    blocks of 64: 46 live tiles, 10.87 computed per live score
    blocks of 256: 10 live tiles, 37.8 computed per live score

    A coarser block computes more dead scores; a finer one has a longer index and smaller matrix products: at equal
    over-coverage, 64 to 128 runs fastest on current GPUs.

    Time is proportional to the live tiles (and for finer blocks to the distinct partial ones). Raises ValueError for a
    bad block, TypeError if `blocks` is not a list.
    """
    pairs = [block_pair(block) for block in _listed(blocks)]
    counts, live = [0] * len(pairs), 0
    for walk in walks(mask):
        live += len(walk.users) * int(walk.live().sum())
        parts: dict[tuple[int, int], Tensor] = {}
        for number, (block_q, block_k) in enumerate(pairs):
            part = min(block_q, mask.block_q), min(block_k, mask.block_k)
            if part not in parts:
                parts[part] = live_parts(walk, *part)
            counts[number] += len(walk.users) * _live_tiles(walk, parts[part], block_q, block_k, mask.blocks[1])
    return [Coarsening(q, k, count, live) for (q, k), count in zip(pairs, counts, strict=True)]


def _listed(blocks: Any) -> Sequence[Block]:
    if not isinstance(blocks, Sequence) or isinstance(blocks, str):
        raise TypeError(f"blocks must be a list of blocks; got {blocks!r}.")
    return blocks


def live_parts(walk: Walk, part_q: int, part_k: int) -> Tensor:
    """Which `part_q x part_k` parts of each kind of tile have a live score: bool `[1 + T, down, across]`."""
    block_q, block_k = walk.block_q, walk.block_k
    found = [torch.ones(1, block_q // part_q, block_k // part_k, dtype=torch.bool, device="cpu")]
    for words in walk.bits.split(max(1, SCORES_AT_ONCE // (block_q * block_k))):
        live = bitmask.unpack(words, block_k)
        found.append(live.view(-1, block_q // part_q, part_q, block_k // part_k, part_k).any(4).any(2))
    return torch.cat(found)


def _live_tiles(walk: Walk, parts: Tensor, block_q: int, block_k: int, col_blocks: int) -> int:
    merged_q, merged_k = max(block_q // walk.block_q, 1), max(block_k // walk.block_k, 1)
    if merged_q == 1 and merged_k == 1:
        return int(parts.sum((1, 2))[walk.kind].sum())
    down, across = parts.shape[1:]
    wide = col_blocks * across
    keys = []
    for a in range(down):
        for b in range(across):
            some = parts[:, a, b][walk.kind]
            row = (walk.rows[some] * down + a) // merged_q
            keys.append(row * wide + (walk.cols[some] * across + b) // merged_k)
    return len(torch.unique(torch.cat(keys)))

"""Which tokens lie on which rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseflash.blockmask.cache import once

Integers = NDArray[np.int64]


def in_blocks(blocks: Integers, block: int) -> Integers:
    """The numbers of all tokens in these blocks of `block`, one block after another; some may be past the end.

    >>> in_blocks(np.array([2, 0]), 3).tolist()
    [6, 7, 8, 0, 1, 2]
    """
    numbers: Integers = (blocks[:, None] * block + np.arange(block)).reshape(-1)
    return numbers


@dataclass(frozen=True, eq=False)
class Shards:
    """The tokens of one side, queries or keys, cut into chunks that are assigned to ranks.

    >>> shards = Shards(length=10, chunk=4, rank_of_chunk=np.array([0, 1, 0]))
    >>> shards.positions(0).tolist(), shards.counts
    ([0, 1, 2, 3, 8, 9], [6, 4])

    `length`, `chunk`: in tokens; `rank_of_chunk`: int64 `[ceil(length / chunk)]`. A rank keeps its tokens in the order
    of the sequence, so that a ragged last chunk is the last one of its rank.
    """

    length: int
    chunk: int
    rank_of_chunk: Integers

    @cached_property
    def ranks(self) -> int:
        return int(self.rank_of_chunk.max()) + 1

    @cached_property
    def counts(self) -> list[int]:
        chunks = np.bincount(self.rank_of_chunk, minlength=self.ranks) * self.chunk
        chunks[self.rank_of_chunk[-1]] -= len(self.rank_of_chunk) * self.chunk - self.length
        counts: list[int] = chunks.tolist()
        return counts

    def positions(self, rank: int) -> Tensor:
        """The positions in the whole sequence of a rank's tokens, ascending: int64 `[counts[rank]]`."""
        tokens = in_blocks(np.flatnonzero(self.rank_of_chunk == rank), self.chunk)
        return torch.from_numpy(tokens[: self.counts[rank]])

    def rank_of_block(self, block: int) -> Integers:
        """The rank of each block of `block` tokens, which must divide the chunk: int64 `[ceil(length / block)]`."""
        return self.rank_of_chunk.repeat(self.chunk // block)[: -(-self.length // block)]

    def place_of_block(self, block: int) -> Integers:
        """The number of each block among the blocks of its rank: int64 `[ceil(length / block)]`."""
        order = np.argsort(self.rank_of_chunk, kind="stable")
        sizes = np.bincount(self.rank_of_chunk, minlength=self.ranks)
        place = np.empty_like(order)
        place[order] = np.arange(len(order)) - (sizes.cumsum() - sizes).repeat(sizes)
        return in_blocks(place, self.chunk // block)[: -(-self.length // block)]

    def size_of_block(self, block: int) -> Integers:
        """The tokens of each block: int64 `[ceil(length / block)]`."""
        sizes = np.full(-(-self.length // block), block)
        sizes[-1] -= len(sizes) * block - self.length
        return sizes

    @cached_property
    def order(self) -> Tensor:
        """The positions of all tokens, one rank after the other: int64 `[length]`."""
        return torch.cat([self.positions(rank) for rank in range(self.ranks)])

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the ranks hold runs of the sequence, in the order of the ranks."""
        return bool((np.diff(self.rank_of_chunk) >= 0).all())

    @cached_property
    def _orders(self) -> dict[Any, Any]:
        return {}

    def order_on(self, device: torch.device) -> Tensor:
        """`order` on a device, moved there once."""
        return once(self._orders, device, lambda: self.order.to(device))

    def in_sequence(self, x: Tensor, dim: int) -> Tensor:
        """Tokens that lie one rank after the other along a dimension, in the order of the sequence."""
        return x if self.is_contiguous else torch.empty_like(x).index_copy_(dim, self.order_on(x.device), x)

    def by_rank(self, x: Tensor, dim: int) -> Tensor:
        return x if self.is_contiguous else x.index_select(dim, self.order_on(x.device))

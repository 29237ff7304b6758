"""How evenly the work of a mask is distributed over its block rows and block columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.walks import walks


@dataclass(frozen=True)
class Spread:
    """A count's least, mean and most over the block rows or columns.

    >>> Spread(least=1, mean=2.5, most=5).ratio
    2.0
    """

    least: int
    mean: float
    most: int

    @property
    def ratio(self) -> float:
        """Most over mean: 1.0 is perfectly even, and also the value if there is no work."""
        return self.most / self.mean if self.mean else 1.0


@dataclass(frozen=True)
class Load:
    """Work of the block rows or columns: live tiles, live scores, and the share that has neither.

    >>> print(Load(tiles=Spread(1, 2.5, 5), scores=Spread(100, 250.0, 500), empty=0.0))
    1 to 5 tiles (mean 2.5, most/mean 2), 0 % empty
    """

    tiles: Spread
    scores: Spread
    empty: float

    def __str__(self) -> str:
        return (
            f"{self.tiles.least} to {self.tiles.most} tiles (mean {self.tiles.mean:.4g}, most/mean "
            f"{self.tiles.ratio:.3g}), {100 * self.empty:.3g} % empty"
        )


@dataclass(frozen=True)
class Balance:
    """The load of the block rows (forward, dQ) and block columns (dK, dV) of one distinct pattern.

    >>> found = balance(BlockMask.from_function(lambda q, k: k <= q, 256, block=64))[0]
    >>> found.rows.tiles.most, found.columns.empty, found.users
    (4, 0.0, ((0, 0),))

    `users`: the (batch element, head) pairs that have the pattern, numbered as in `mask.shape`. Rows and columns past a
    sequence's length are not counted.
    """

    rows: Load
    columns: Load
    users: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"rows: {self.rows}; columns: {self.columns}"


def balance(mask: BlockMask) -> tuple[Balance, ...]:
    """The balance of each distinct (pattern, length) of a mask, in order of first appearance; most masks have one.

    >>> mask = BlockMask.from_function(lambda q, k: (k <= q) | (k < 64), 256, block=64)
    >>> print(balance(mask)[0])
    rows: 1 to 4 tiles (mean 2.5, most/mean 1.6), 0 % empty; columns: 1 to 4 tiles (mean 2.5, most/mean 1.6), 0 % empty

    The forward computes one block row a program, dK and dV one block column. The GPU starts the longest first, so a
    ratio of two (causal) costs nothing, but one row with more than a multiprocessor's share of the work makes the
    others wait.
    """
    found = []
    for walk in walks(mask):
        live = walk.live()
        rows, cols = -(-walk.q_stop // mask.block_q), -(-walk.k_stop // mask.block_k)
        found.append(Balance(_load(walk.rows, live, rows), _load(walk.cols, live, cols), walk.users))
    return tuple(found)


def _load(where: Tensor, live: Tensor, count: int) -> Load:
    scores = torch.zeros(count, dtype=torch.int64, device="cpu").index_add_(0, where, live)
    tiles = torch.zeros(count, dtype=torch.int64, device="cpu").index_add_(0, where, (live > 0).long())
    return Load(_spread(tiles), _spread(scores), float((tiles == 0).double().mean()) if count else 0.0)


def _spread(counts: Tensor) -> Spread:
    if not len(counts):
        return Spread(0, 0.0, 0)
    return Spread(int(counts.min()), float(counts.double().mean()), int(counts.max()))

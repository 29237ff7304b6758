from __future__ import annotations

from typing import NamedTuple

import torch

from experiments.training.clock import Clock
from experiments.training.distributed import Ranks
from experiments.training.steps import BatchSize, Outcome


class Means(NamedTuple):
    """Over the steps since the last log line, of all processes."""

    loss: float
    auxiliary: float
    right: float  # a sum, as are the following
    answers: int
    tokens: int
    places: int


class Window:
    """On the device, so that no step waits."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)
        self._loss, self._auxiliary, self._right = self._sums.unbind()
        self.steps = 0
        self.size = BatchSize(0, 0, 0)
        self.clock = Clock(device)

    def add(self, outcome: Outcome, size: BatchSize) -> None:
        self._loss += outcome.loss
        self._auxiliary += outcome.auxiliary
        self._right += outcome.right
        self.steps += 1
        self.size = BatchSize(*(known + new for known, new in zip(self.size, size, strict=True)))

    def means(self, ranks: Ranks) -> Means:
        counts = torch.tensor(self.size, dtype=torch.float64, device=self._sums.device)
        loss, auxiliary, right, *sizes = ranks.sum_over_shares(torch.cat([self._sums, counts])).tolist()
        steps = self.steps * ranks.data_parallel_ranks
        return Means(loss / steps, auxiliary / steps, right, *map(int, sizes))

"""Context parallelism: attention over sequences whose tokens lie in several processes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from experiments.lm.model.attention import Attention
from experiments.training.distributed import Ranks
from experiments.training.shared_sequences import SharedSequences
from sparseflash import BlockMask, distributed
from sparseflash.distributed import ShardPlan


class SharedContext:
    """masks: of the layers; the one with the most live scores assigns the tokens."""

    def __init__(self, ranks: Ranks, masks: Sequence[BlockMask]) -> None:
        self._sequences = SharedSequences(ranks)
        self._leading = max(masks, key=lambda mask: mask.density)

    @property
    def layout(self) -> ShardPlan:
        return self._sequences.plan(self._leading)

    def positions(self, device: torch.device) -> Tensor:
        return self.layout.positions_of("queries").on(device)

    @property
    def share(self) -> float:
        queries = self.layout.queries
        return queries.counts[self.layout.rank] * self.layout.ranks / queries.length

    def scatter(self, x: Tensor) -> Tensor:
        return self.layout.scatter(x, -1)

    def gather(self, x: Tensor) -> Tensor:
        return self.layout.gather(x, -1)

    def attention(self, mask: BlockMask) -> Attention:
        return partial(self._attention, mask=mask)

    def attention_once(self, mask: BlockMask) -> Attention:
        return partial(distributed.attention, plan=self._sequences.plan_once(mask, self.layout))

    def clear(self) -> None:
        self._sequences.clear()

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, *, mask: BlockMask) -> Tensor:
        # A model would keep the process group of an argument.
        out: Tensor = distributed.attention(q, k, v, self._sequences.plan(mask, self.layout))
        return out

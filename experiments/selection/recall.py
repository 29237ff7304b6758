"""Associative recall: given a key, name the value that came with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    keys: Tensor  # int64 [B, N]
    values: Tensor  # `Recall.values` at queries
    answers: Tensor  # of the last Q tokens
    where: Tensor  # the token with the answer


@dataclass(frozen=True)
class Recall:
    """The last `queries` of `tokens` tokens ask for values of earlier ones.

    The queries of a block ask for tokens in `spread` blocks, as neighbours in a text often need the same passages.
    """

    tokens: int = 256
    queries: int = 64
    keys: int = 256
    values: int = 16
    block: int = 16
    spread: int = 2

    def __post_init__(self) -> None:
        pairs = self.tokens - self.queries
        if self.queries % self.block or pairs % self.block or not 0 < self.spread <= pairs // self.block:
            raise ValueError(
                f"tokens and queries must be multiples of the block, with {self.spread} blocks of pairs; got {self}."
            )
        if pairs > self.keys:
            raise ValueError(f"keys must be at least as many as pairs, {pairs}; got {self.keys}.")

    def batch(self, count: int, generator: torch.Generator) -> Batch:
        device, pairs = generator.device, self.tokens - self.queries

        def drawn(stop: int, *shape: int) -> Tensor:
            return torch.randint(stop, shape, generator=generator, device=device)

        keys = torch.rand(count, self.keys, generator=generator, device=device).argsort(1)[:, :pairs]
        values = drawn(self.values, count, pairs)
        asking = self.queries // self.block
        blocks = torch.rand(count, asking, pairs // self.block, generator=generator, device=device).argsort(2)
        chosen = blocks[..., : self.spread].gather(2, drawn(self.spread, count, asking, self.block))
        where = (chosen * self.block + drawn(self.block, count, asking, self.block)).flatten(1)
        none = torch.full((count, self.queries), self.values, device=device)
        return Batch(
            torch.cat([keys, keys.gather(1, where)], 1), torch.cat([values, none], 1), values.gather(1, where), where
        )

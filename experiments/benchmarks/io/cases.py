"""The cases that are counted and timed: one `Case` for each row of the tables."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sparseflash import BlockMask, masks

STANDARD, DENSE, BUTTERFLY = "standard", "dense", "butterfly"


@dataclass(frozen=True)
class Case:
    """One attention, forward and backward, over q, k, v of shape [batch, heads, length, head_dim]."""

    kind: str  # STANDARD: softmax of the whole matrix by PyTorch's operators; DENSE, BUTTERFLY: sparseflash
    factors: int | None  # number of butterfly factors
    batch: int
    heads: int
    length: int  # tokens
    head_dim: int
    block: int  # tokens
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """The name of the case in tables."""
        if self.factors is None:
            return self.kind
        return f"{self.kind}, {self.factors} factor{'s' * (self.factors != 1)}"

    def mask(self) -> BlockMask:
        """The live scores, on the CPU."""
        if self.kind == BUTTERFLY:
            return masks.butterfly(self.length, factors=self.factors, block=self.block)
        return BlockMask.dense(self.length, block=self.block)

    def words(self) -> list[str]:
        """The case as arguments of the command that runs one case."""
        shape = (self.batch, self.heads, self.length, self.head_dim, self.block)
        dtype = str(self.dtype).removeprefix("torch.")
        return [self.kind, str(-1 if self.factors is None else self.factors), *map(str, shape), dtype]


def of_words(words: list[str]) -> Case:
    """The inverse of `Case.words`."""
    kind, factors, *shape, dtype = words
    batch, heads, length, head_dim, block = map(int, shape)
    return Case(
        kind, None if int(factors) < 0 else int(factors), batch, heads, length, head_dim, block, getattr(torch, dtype)
    )


def every_density(case: Case) -> list[Case]:
    """The case with standard attention, ours dense, and ours under butterflies of 0, 1, ... factors."""
    most = (-(-case.length // case.block) - 1).bit_length()
    first = [replace(case, kind=kind, factors=None) for kind in (STANDARD, DENSE)]
    return first + [replace(case, kind=BUTTERFLY, factors=factors) for factors in range(most, -1, -1)]

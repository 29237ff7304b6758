"""Blocks of keys chosen at every step: MoBA (Lu et al., 2025), the choice without parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflash import attention, masks


@dataclass(frozen=True)
class ChosenBlocks:
    """A layer whose queries choose among the blocks before them; it stands where other layers have a mask.

    Each query of each head sees its own block and the `chosen - 1` blocks before it whose mean keys it likes best.
    """

    length: int
    block: int
    chosen: int

    @property
    def q_len(self) -> int:
        return self.length

    @property
    def k_len(self) -> int:
        return self.length

    @property
    def density(self) -> float:
        """The share of live scores, from the length alone: every choice has as many."""
        places = range(0, self.length, self.block)
        whole = sum(min(self.chosen - 1, place // self.block) * self.block * self.block for place in places)
        own = len(places) * self.block * (self.block + 1) / 2
        return (whole + own) / self.length**2

    def to(self, device: torch.device | str) -> ChosenBlocks:
        """Itself: it holds no tensors."""
        return self

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention [B, H, N, D] of q, k and v [B, H, N, D]."""
        with torch.no_grad():
            scores = q @ k.unflatten(2, (-1, self.block)).mean(3).mT  # [B, H, N, blocks]
            number = torch.arange(scores.shape[-1], device=q.device)
            own = torch.arange(q.shape[2], device=q.device)[:, None] // self.block == number
            mask = masks.top_k_keys(
                scores.masked_fill(own, torch.inf), k=self.chosen, k_len=self.length, span=self.block,
                block=min(128, self.block), causal=True,
            )  # fmt: skip
        out: Tensor = attention(q, k, v, mask)
        return out

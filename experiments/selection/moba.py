"""MoBA (Lu et al., 2025): every query attends to the chunks with the highest-scoring mean keys, and to its own chunk.

The choice has no parameters and no gradient. Each query head chooses for itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.selection.sizes import Sizes
from sparseflash import BlockMask, attention, masks


class MoBA(nn.Module):
    """Section 2.2 of the paper, with `chosen` chunks of `block` keys, the own chunk included."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, BlockMask]:
        """x `[B, N, width]`, q `[B, Hq, N, D]`, k and v `[B, Hkv, N, D]`."""
        mask = self.choice(q, k)
        return attention(q, k, v, mask), mask

    def choice(self, q: Tensor, k: Tensor) -> BlockMask:
        """The gate: a score for each query and chunk."""
        sizes = self.sizes
        means = k.unflatten(2, (-1, sizes.block)).mean(3).repeat_interleave(sizes.group, 1)  # [B, Hq, chunks, D]
        gates = with_own_block(q @ means.mT, sizes.block)
        return masks.top_k_keys(
            gates, k=sizes.chosen, k_len=sizes.tokens, span=sizes.block, block=sizes.tile, causal=True
        )


def with_own_block(scores: Tensor, block: int) -> Tensor:
    """Scores `[..., N, chunks]` with infinity at the query's own chunk, so that it is always chosen."""
    queries, chunks = scores.shape[-2:]
    own = torch.arange(queries, device=scores.device)[:, None] // block == torch.arange(chunks, device=scores.device)
    return scores.masked_fill(own, torch.inf)

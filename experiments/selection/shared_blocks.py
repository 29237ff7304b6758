"""Block selection shared by groups, as in MiniMax's models: the query heads over one key head choose together.

A small indexer scores tokens; the score of a block is its highest token's, and every query keeps the best blocks, its
own and the first. The indexer learns, beside the model, to predict where attention goes among all blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from experiments.selection.moba import with_own_block
from experiments.selection.sizes import Sizes
from sparseflash import BlockMask, attention, masks


class SharedBlocks(nn.Module):
    """`chosen` blocks a query and key head. `loss` is the indexer's own, to be added to the model's."""

    def __init__(self, sizes: Sizes, index_dim: int = 32) -> None:
        super().__init__()
        self.sizes, self.index_dim = sizes, index_dim
        self.index_q = nn.Linear(sizes.width, sizes.kv_heads * index_dim, bias=False)
        self.index_k = nn.Linear(sizes.width, index_dim, bias=False)
        self.loss: Tensor | None = None

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, BlockMask]:
        """x `[B, N, width]`, q `[B, Hq, N, D]`, k and v `[B, Hkv, N, D]`."""
        # One sequence at a time, and once more in the backward pass: scores of all pairs of tokens are much to keep.
        # The indexer's loss does not reach the model.
        each = zip(*(part.detach().split(1) for part in (x, q, k)), strict=True)
        found = [checkpoint(self.index, *sequence, use_reentrant=False) for sequence in each]
        if self.training:
            self.loss = torch.stack([loss for _, loss in found]).mean()
        sizes = self.sizes
        blocks = with_own_block(torch.cat([scores for scores, _ in found]), sizes.block)
        mask = masks.top_k_keys(
            blocks, k=sizes.chosen, k_len=sizes.tokens, span=sizes.block, block=sizes.tile, causal=True,
            group=sizes.group,
        )  # fmt: skip
        return attention(q, k, v, mask), mask

    def index(self, x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of blocks `[B, Hkv, N, N / block]`, without gradients, and the loss, 0 if nothing is trained."""
        scores = self.scores(x)
        loss = self.distillation(scores, q, k) if self.training else scores.new_zeros(())
        return scores.detach().unflatten(3, (-1, self.sizes.block)).amax(4), loss

    def scores(self, x: Tensor) -> Tensor:
        """The indexer's logits `[B, Hkv, N, N]`, -inf for the future."""
        index_q = self.index_q(x).unflatten(2, (self.sizes.kv_heads, -1)).transpose(1, 2)
        logits = index_q @ self.index_k(x).unsqueeze(1).mT * self.index_dim**-0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return logits.masked_fill(future, -torch.inf)

    def distillation(self, scores: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """How far the indexer's weights are from those of dense attention, summed over the heads of a group."""
        future = scores == -torch.inf
        keys = k.repeat_interleave(self.sizes.group, 1)
        weights = (q @ keys.mT * q.shape[-1] ** -0.5).unflatten(1, (-1, self.sizes.group))
        target = weights.masked_fill(future.unsqueeze(2), -torch.inf).softmax(-1).mean(2)
        logs = F.log_softmax(scores, -1).masked_fill(future, 0.0)
        return -(target * logs).sum(-1).mean()

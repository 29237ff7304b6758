"""Block selection shared by groups, as in MiniMax's models: the query heads of one key head choose together.

A small indexer scores tokens. A block's score is its highest token score. Every query keeps the best blocks, its own
block and the first block. A second loss trains the indexer to predict the attention weights of all blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from experiments.selection.moba import with_own_block
from experiments.selection.sizes import Sizes
from sparseflash import BlockMask, attention, masks

_CHUNK = 2048  # queries whose scores of all keys are in memory at once


class SharedBlocks(nn.Module):
    """Attention to `chosen` blocks for each query and key head. Add `loss`, the indexer's loss, to the model's loss.

    taught: in training, the indexer learns from the dense attention of this many random queries in each sequence (or of
        all, if fewer). Not from all, because dense scores with gradients dominate the time.
    """

    def __init__(self, sizes: Sizes, index_dim: int = 32, taught: int = 2048) -> None:
        super().__init__()
        self.sizes, self.index_dim, self.taught = sizes, index_dim, taught
        self.index_q = nn.Linear(sizes.width, sizes.kv_heads * index_dim, bias=False)
        self.index_k = nn.Linear(sizes.width, index_dim, bias=False)
        self.loss: Tensor | None = None

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, BlockMask]:
        """x `[B, N, width]`, q `[B, Hq, N, D]`, k and v `[B, Hkv, N, D]`."""
        # The indexer's loss does not reach the model.
        sequences = list(zip(*(part.detach().split(1) for part in (x, q, k)), strict=True))
        if self.training:
            # Recomputed in the backward, so that only one sequence's scores are in memory.
            losses = [checkpoint(self.distillation, *each, self.queries(x), use_reentrant=False) for each in sequences]
            self.loss = torch.stack(losses).mean()
        sizes = self.sizes
        mask = masks.top_k_keys(
            with_own_block(torch.cat([self.blocks(part) for part, _, _ in sequences]), sizes.block),
            k=sizes.chosen, k_len=sizes.tokens, span=sizes.block, block=sizes.tile, causal=True, group=sizes.group,
        )  # fmt: skip
        return attention(q, k, v, mask), mask

    def queries(self, x: Tensor) -> Tensor:
        """The positions of the queries that train the indexer."""
        tokens = x.shape[1]
        if tokens <= self.taught:
            return torch.arange(tokens, device=x.device)
        return torch.randperm(tokens, device=x.device)[: self.taught]

    @torch.no_grad()
    def blocks(self, x: Tensor) -> Tensor:
        """The scores of blocks, `[B, Hkv, N, N / block]`."""
        chunks = torch.arange(x.shape[1], device=x.device).split(_CHUNK)
        return torch.cat([self.scores(x, rows).unflatten(3, (-1, self.sizes.block)).amax(4) for rows in chunks], 2)

    def scores(self, x: Tensor, rows: Tensor) -> Tensor:
        """The indexer's logits `[B, Hkv, rows, N]` of some queries, -inf for future keys."""
        index_q = self.index_q(x[:, rows]).unflatten(2, (self.sizes.kv_heads, -1)).transpose(1, 2)
        logits = index_q @ self.index_k(x).unsqueeze(1).mT * self.index_dim**-0.5
        return logits.masked_fill(_future(rows, x), -torch.inf)

    def distillation(self, x: Tensor, q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
        """The divergence of the indexer's weights from dense attention weights, summed over the heads of a group."""
        future = _future(rows, x)
        keys = k.repeat_interleave(self.sizes.group, 1)
        weights = (q[:, :, rows] @ keys.mT * q.shape[-1] ** -0.5).unflatten(1, (-1, self.sizes.group))
        target = weights.masked_fill(future, -torch.inf).softmax(-1).mean(2)
        logs = F.log_softmax(self.scores(x, rows), -1).masked_fill(future, 0.0)
        return -(target * logs).sum(-1).mean()


def _future(rows: Tensor, x: Tensor) -> Tensor:
    """Which keys come after these queries: bool `[rows, N]`."""
    return torch.arange(x.shape[1], device=x.device) > rows[:, None]

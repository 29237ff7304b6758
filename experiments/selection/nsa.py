"""Native sparse attention (Yuan et al., 2025): three branches, compressed, selected and near keys, joined by gates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.selection.moba import with_own_block
from experiments.selection.sizes import Sizes
from sparseflash import BlockMask, attention, masks


class NSA(nn.Module):
    """Section 3 of the paper, with compression blocks as long as selection blocks, not overlapping.

    Selection reuses the weights of the compressed branch, summed over the query heads of a group. The group shares the
    choice.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.pool = nn.Parameter(torch.zeros(2, sizes.kv_heads, sizes.block, 1))  # logits of the keys of a block
        self.gate = nn.Linear(sizes.width, 3 * sizes.heads)
        self.near = masks.local(sizes.tokens, window=sizes.block, causal=True, block=sizes.tile)
        blocks, block = sizes.tokens // sizes.block, sizes.block
        self.past = BlockMask.from_function(lambda q, j: (j + 1) * block <= q + 1, sizes.tokens, blocks, block=16)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, BlockMask]:
        """x `[B, N, width]`, q `[B, Hq, N, D]`, k and v `[B, Hkv, N, D]`."""
        self.near, self.past = self.near.to(q.device), self.past.to(q.device)
        k_blocks, v_blocks = self.compressed(k, 0), self.compressed(v, 1)
        compressed, lse = attention(q, k_blocks, v_blocks, self.past, return_lse=True)
        chosen = self.choice(q, k_blocks, lse)
        selected = attention(q, k, v, chosen)
        near = attention(q, k, v, self.near)
        gates = torch.sigmoid(self.gate(x)).unflatten(2, (3, -1)).permute(2, 0, 3, 1).unsqueeze(-1)  # [3, B, Hq, N, 1]
        return gates[0] * compressed + gates[1] * selected + gates[2] * near, chosen

    def compressed(self, x: Tensor, which: int) -> Tensor:
        """One key (or value) for each block: a learned weighted mean, `[B, Hkv, blocks, D]`."""
        weights = self.pool[which].softmax(1).unsqueeze(1)  # [Hkv, 1, block, 1]
        return (x.unflatten(2, (-1, self.sizes.block)) * weights).sum(3)

    @torch.no_grad()
    def choice(self, q: Tensor, k_blocks: Tensor, lse: Tensor) -> BlockMask:
        """The blocks with the largest weights in the compressed branch, and the query's own block."""
        sizes = self.sizes
        keys = k_blocks.repeat_interleave(sizes.group, 1)
        weights = torch.exp(q @ keys.mT * sizes.dim**-0.5 - lse.unsqueeze(-1))  # of past blocks
        scores = with_own_block(weights.unflatten(1, (-1, sizes.group)).sum(2), sizes.block)
        return masks.top_k_keys(
            scores, k=sizes.chosen, k_len=sizes.tokens, span=sizes.block, block=sizes.tile, causal=True,
            group=sizes.group,
        )  # fmt: skip

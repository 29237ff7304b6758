"""Video sparse attention (Zhang et al., 2025): cubes of video tokens attend to the cubes with the highest scores.

Tokens are reordered so that a cube is a block of the mask. A coarse stage attends between the means of cubes, and its
scores choose the cubes of the fine stage. Gates join both stages. Attention is not causal.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.selection.sizes import Sizes
from sparseflash import BlockMask, attention, masks


class VSA(nn.Module):
    """A video of `shape` (frames, height, width) in cubes of `cube`, with `sizes.block` tokens each."""

    def __init__(self, sizes: Sizes, shape: tuple[int, int, int], cube: tuple[int, int, int]) -> None:
        super().__init__()
        self.sizes = sizes
        if cube[0] * cube[1] * cube[2] != sizes.block or shape[0] * shape[1] * shape[2] != sizes.tokens:
            raise ValueError(
                f"cube and shape must have {sizes.block} and {sizes.tokens} tokens; got {cube} and {shape}."
            )
        order = masks.order.tiles(shape, cube)
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("inverse", masks.order.inverse(order), persistent=False)
        self.gate = nn.Linear(sizes.width, 2 * sizes.heads)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, BlockMask]:
        """x `[B, N, width]`, q `[B, Hq, N, D]`, k and v `[B, Hkv, N, D]`, in video order."""
        block = self.sizes.block
        q, k, v = (y[:, :, self.order] for y in (q, k, v))
        means = [y.unflatten(2, (-1, block)).mean(3) for y in (q, k, v)]
        coarse = attention(*means).repeat_interleave(block, 2)
        mask = self.choice(q, k)
        fine = attention(q, k, v, mask)
        gates = torch.sigmoid(self.gate(x)).unflatten(2, (2, -1)).permute(2, 0, 3, 1).unsqueeze(-1)
        coarse, fine = coarse[:, :, self.inverse], fine[:, :, self.inverse]
        return gates[0] * coarse + gates[1] * fine, mask

    def choice(self, q: Tensor, k: Tensor) -> BlockMask:
        """The best cubes for each cube, as a block list in cube order."""
        scores = masks.pooled_scores(q, k, block=self.sizes.block)  # [B, Hq, cubes, cubes]
        index = scores.topk(min(self.sizes.chosen, scores.shape[-1]), sorted=False).indices
        return BlockMask.from_block_index(index, block=self.sizes.block, q_len=self.sizes.tokens)

"""What choices are held against: dense attention, and patterns that are the same for every sequence."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from experiments.selection.sizes import Sizes
from sparseflash import BlockMask, attention, masks


class Fixed(nn.Module):
    """Attention under one mask."""

    def __init__(self, sizes: Sizes, pattern: Callable[[Sizes], BlockMask]) -> None:
        super().__init__()
        self.mask = pattern(sizes)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, BlockMask]:
        """x `[B, N, width]`, q `[B, Hq, N, D]`, k and v `[B, Hkv, N, D]`."""
        self.mask = self.mask.to(q.device)
        return attention(q, k, v, self.mask), self.mask


def dense(sizes: Sizes) -> BlockMask:
    """Everything before a token."""
    return masks.causal(sizes.tokens, block=sizes.tile)


def window(sizes: Sizes) -> BlockMask:
    """As many of the nearest keys as a choice has."""
    return masks.local(sizes.tokens, window=sizes.chosen * sizes.block, causal=True, block=sizes.tile)


def strided(sizes: Sizes) -> BlockMask:
    """Half of as many of the nearest keys, and every n-th of the others, so that it has as many as a choice."""
    half = max(1, sizes.chosen * sizes.block // 2)
    return masks.strided(sizes.tokens, stride=max(1, sizes.tokens // half), block=sizes.tile) | masks.local(
        sizes.tokens, window=half, causal=True, block=sizes.tile
    )

"""Baselines: dense attention, and patterns that are the same for every sequence."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from experiments.selection.sizes import Sizes
from sparseflash import BlockMask, attention, masks
from sparseflash.cli.pattern_text import mask_of_pattern


class Fixed(nn.Module):
    def __init__(self, sizes: Sizes, pattern: Callable[[Sizes], BlockMask]) -> None:
        super().__init__()
        self.mask = pattern(sizes)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, BlockMask]:
        """x `[B, N, width]`, q `[B, Hq, N, D]`, k and v `[B, Hkv, N, D]`."""
        self.mask = self.mask.to(q.device)
        return attention(q, k, v, self.mask), self.mask


def dense(sizes: Sizes) -> BlockMask:
    return masks.causal(sizes.tokens, block=sizes.tile)


def window(sizes: Sizes) -> BlockMask:
    """A causal window with as many keys as a choice has."""
    return masks.local(sizes.tokens, window=sizes.chosen * sizes.block, causal=True, block=sizes.tile)


def strided(sizes: Sizes) -> BlockMask:
    """A causal window of half as many keys as a choice has, and every n-th earlier key for the other half."""
    half = max(1, sizes.chosen * sizes.block // 2)
    return masks.strided(sizes.tokens, stride=max(1, sizes.tokens // half), block=sizes.tile) | masks.local(
        sizes.tokens, window=half, causal=True, block=sizes.tile
    )


def of_text(text: str, sizes: Sizes) -> BlockMask:
    """Any pattern, without keys after their query."""
    mask = mask_of_pattern(text, sizes.tokens, block=sizes.tile, heads=sizes.heads)
    return mask & masks.causal(sizes.tokens, block=(mask.block_q, mask.block_k))

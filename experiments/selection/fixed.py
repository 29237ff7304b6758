"""Baselines: dense attention, and patterns that are the same for every sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from experiments.selection.sizes import Sizes
from sparseflash import BlockMask, attention, masks
from sparseflash.cli.pattern_text import mask_of_pattern
from sparseflash.selection.layer import SelectionLayer


class Fixed(SelectionLayer):
    def __init__(self, mask: BlockMask, *sizes: int, **options: Any) -> None:
        super().__init__(
            *sizes, bias=False, rotary=None, scale=None, backend=None, device=None, dtype=None, **options
        )  # fmt: skip
        self.of_all = mask

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        self.of_all = self.of_all.to(q.device)
        return attention(q, k, v, self.of_all)


def dense(sizes: Sizes) -> BlockMask:
    return masks.causal(sizes.tokens, block=sizes.tile)


def window(sizes: Sizes) -> BlockMask:
    return masks.local(sizes.tokens, window=sizes.chosen * sizes.block, causal=True, block=sizes.tile)


def strided(sizes: Sizes) -> BlockMask:
    half = max(1, sizes.chosen * sizes.block // 2)
    return masks.strided(sizes.tokens, stride=max(1, sizes.tokens // half), block=sizes.tile) | masks.local(
        sizes.tokens, window=half, causal=True, block=sizes.tile
    )


def of_text(text: str, sizes: Sizes) -> BlockMask:
    mask = mask_of_pattern(text, sizes.tokens, block=sizes.tile, heads=sizes.heads)
    return mask & masks.causal(sizes.tokens, block=(mask.block_q, mask.block_k))

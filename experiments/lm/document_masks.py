"""Masks of packed sequences with separate documents: the layers' patterns, cut at document ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from experiments.lm.data.packing import Packing
from experiments.lm.model.attention import Attention
from sparseflash import BlockMask, masks


class DocumentMasks:
    """The host builds the masks, a fraction of a second for each batch."""

    def __init__(self, layers: Sequence[BlockMask], attention_of: Callable[[BlockMask], Attention]) -> None:
        self.layers, self.attention_of = tuple(layers), attention_of

    def masks(self, lengths: Sequence[Sequence[int]]) -> list[BlockMask]:
        made: dict[int, BlockMask] = {}
        for layer in self.layers:
            if id(layer) not in made:
                blocks = layer.block_q, layer.block_k
                rows = [layer & masks.documents(row, causal=True, block=blocks) for row in lengths]
                made[id(layer)] = masks.per_batch(rows)
        return [made[id(layer)] for layer in self.layers]

    def attentions(self, packing: Packing, numbers: np.ndarray) -> list[Attention]:
        layers = self.masks([packing.documents(int(number)) for number in numbers])
        made: dict[int, Attention] = {}
        for mask in layers:
            if id(mask) not in made:
                made[id(mask)] = self.attention_of(mask)
        return [made[id(mask)] for mask in layers]

    def of_parts(self, packing: Packing, numbers: np.ndarray, part: int) -> tuple[list[Attention], ...]:
        return tuple(self.attentions(packing, numbers[start : start + part]) for start in range(0, len(numbers), part))

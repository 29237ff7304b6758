"""Tensors at fixed addresses, for CUDA graphs; packings are copied into them.

They are larger than a packing, and the filling has no effect: an image without blocks and label is in no loss, and
tiles after the last row belong to no row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.pathx.data.device_batch import Batch, arrays_of, batch_of
from experiments.pathx.data.packing import Packed
from experiments.pathx.masks.relations import Relation
from experiments.training.cuda_graphs import copy_into
from experiments.training.steps import NO_LABEL

_SPARE = 1.5


class StaticPacking:
    def __init__(
        self,
        packed: Packed,
        device: torch.device,
        layers: Sequence[Relation],
        registers: int,
        *,
        images: int,
        blocks: int,
    ) -> None:
        self.images, self.blocks, self.layers, self.registers = images, blocks, layers, registers
        self.packed_like = packed.block, packed.side, packed.tokens, packed.images
        self.tensors: dict[str, Tensor] = {}
        for name, array in self._arrays(packed).items():
            length = int(_SPARE * len(array)) + 1 if _varies(name) else len(array)
            tensor = torch.from_numpy(np.zeros((length, *array.shape[1:]), array.dtype))
            self.tensors[name] = tensor.to(device)
        self.fill(packed)

    def fits(self, packed: Packed) -> bool:
        return all(len(array) <= len(self.tensors[name]) for name, array in arrays_of(packed).items() if _varies(name))

    def fill(self, packed: Packed) -> None:
        for name, array in self._arrays(packed).items():
            copy_into(self.tensors[name][: len(array)], torch.from_numpy(np.ascontiguousarray(array)))

    def on_device(self) -> Batch:
        block, side, tokens, images = self.packed_like
        return batch_of(self.tensors, self.layers, block, self.registers, side=side, tokens=tokens, images=images)

    def _arrays(self, packed: Packed) -> dict[str, NDArray[np.generic]]:
        images, blocks = packed.blocks.shape
        if images > self.images or blocks > self.blocks:
            raise ValueError(
                f"a recorded step has room for {self.images} images of at most {self.blocks} blocks; got {images} of "
                f"up to {blocks}. Train with --no-recorded"
            )
        arrays = arrays_of(packed)
        all_blocks = np.full((self.images, self.blocks), packed.ids.size // packed.block, np.int64)
        all_blocks[:images, :blocks] = packed.blocks
        labels = np.full(self.images, NO_LABEL, np.int64)
        labels[:images] = packed.labels
        return arrays | {"blocks": all_blocks, "labels": labels}


def _varies(name: str) -> bool:
    return name.startswith("tiles.") and not name.endswith(".indptr")

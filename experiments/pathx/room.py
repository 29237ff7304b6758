"""Tensors that packings are copied into, one after the other: they stay where they are, as a CUDA graph needs it.

Packings of a stage differ in three numbers: images, blocks of the fullest image, and tiles of the masks. So there is
room for more of each, and what is in the room is harmless: an image without blocks and without a label is in no loss,
and tiles past the last row's belong to none (sparseflash.blockmask.dynamic). Images and blocks have as much room as any
batch can fill, so that the same sums are formed whatever came before; tiles, which change no sum, have what the first
packing needs and half as much again.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.lra.batches import NO_LABEL
from experiments.lra.recording import refill
from experiments.pathx.batch import arrays_of
from experiments.pathx.packing import Packed

_SPARE = 1.5  # times the tiles of the first packing


class Room:
    """Room for packings like `packed`, of at most `images` images with at most `blocks` blocks each."""

    def __init__(self, packed: Packed, device: torch.device, *, images: int, blocks: int) -> None:
        self.images, self.blocks = images, blocks
        self.tensors: dict[str, Tensor] = {}
        for name, array in self._arrays(packed).items():
            length = int(_SPARE * len(array)) + 1 if _varies(name) else len(array)
            tensor = torch.from_numpy(np.zeros((length, *array.shape[1:]), array.dtype))
            self.tensors[name] = tensor.to(device)
        self.take(packed)

    def holds(self, packed: Packed) -> bool:
        """Whether there is room for all its tiles."""
        return all(len(array) <= len(self.tensors[name]) for name, array in arrays_of(packed).items() if _varies(name))

    def take(self, packed: Packed) -> None:
        """Copy a packing into the room; the host does not wait for it.

        Raises ValueError where it has more images, or one of more blocks, than there is room for.
        """
        for name, array in self._arrays(packed).items():
            refill(self.tensors[name][: len(array)], torch.from_numpy(np.ascontiguousarray(array)))

    def _arrays(self, packed: Packed) -> dict[str, NDArray[np.generic]]:
        """Its arrays, with room for images."""
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
    """Whether packings of a stage have arrays of different lengths by this name."""
    return name.startswith("tiles.") and not name.endswith(".indptr")

"""Copies several small arrays to a GPU at once, because each copy costs the host as much as a kernel launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask.compiling import is_faking

_ALIGNED = 4  # int32 numbers in 16 bytes, the alignment that kernels expect


def to_device(arrays: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same int32 arrays on `device`, of any shapes; each begins at a multiple of 16 bytes.

    >>> [x.tolist() for x in to_device([torch.ones(3, dtype=torch.int32)], torch.device("cpu"))]
    [[1, 1, 1]]
    """
    if device.type == "cpu" or any(x.device.type != "cpu" for x in arrays) or is_faking():
        return [x.to(device) for x in arrays]
    sizes: list[int] = []  # of an array, and of the space behind it
    for x in arrays:
        sizes += x.numel(), -x.numel() % _ALIGNED
    buffer = np.empty(sum(sizes), dtype=np.int32)
    start = 0
    for x, size, space in zip(arrays, sizes[::2], sizes[1::2], strict=True):
        buffer[start : start + size] = x.detach().numpy().reshape(-1)
        start += size + space
    # A copy from pageable memory has read its source when it returns, so `buffer` may be freed.
    parts = torch.from_numpy(buffer).to(device, non_blocking=True).split(sizes)[::2]
    # A view of all, also of flat arrays: Dynamo sets no attribute on a part itself.
    return [part.view(x.shape) for part, x in zip(parts, arrays, strict=True)]

"""Small arrays from the host to a GPU in one copy: each copy of its own costs the host as much as a kernel's launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 4  # numbers in 16 bytes, the multiples of which kernels expect arrays to begin at


def to_device(arrays: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same int32 arrays on `device`, whatever their shapes; each begins at a multiple of 16 bytes.

    >>> [x.tolist() for x in to_device([torch.ones(3, dtype=torch.int32)], torch.device("cpu"))]
    [[1, 1, 1]]
    """
    if device.type == "cpu" or any(x.device.type != "cpu" for x in arrays):
        return [x.to(device) for x in arrays]
    starts, total = [], 0
    for x in arrays:
        starts.append(total)
        total += -(-x.numel() // _ALIGNED) * _ALIGNED
    buffer = np.empty(total, dtype=np.int32)
    for start, x in zip(starts, arrays, strict=True):
        buffer[start : start + x.numel()] = x.detach().reshape(-1).numpy()
    # What is copied from memory that is not pinned has been read when this returns.
    there = torch.from_numpy(buffer).to(device, non_blocking=True)
    return [there[start : start + x.numel()].view(x.shape) for start, x in zip(starts, arrays, strict=True)]

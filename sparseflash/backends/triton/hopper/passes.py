"""What makes the passes of the family of kernels for Hopper, as `dispatch.py` wants them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparseflash.backends.triton.family import Setting
from sparseflash.backends.triton.hopper.backward_pass import Backward
from sparseflash.backends.triton.hopper.forward_pass import Forward


def forward(
    setting: Setting, key: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, dropped: int
) -> Forward:  # fmt: skip
    """The forward of a plan for tensors like these."""
    return Forward(setting, q, k, v, scale)


def backward(
    setting: Setting, key: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, scale: float, dropped: int,
    *, dlse: bool,
) -> Backward:  # fmt: skip
    """The backward of a plan for tensors like these. dlse: whether a gradient comes through lse."""
    return Backward(setting, q, k, v, out, dout, scale, dlse=dlse)

"""What every pass of kernels over tensors of one layout does: examples, memory, and launches with their merges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.triton.portable.launches import Bound
from sparseflash.backends.triton.portable.merging import Combine
from sparseflash.blockmask.cache import BoundedDict

layouts = BoundedDict(256)  # by the direction and everything that they depend on


def run_kernel(kernel: Bound, combine: Combine | None, given: Mapping[str, Any]) -> None:
    """Launches a kernel, and the kernel that merges its chunks if there are any, with what they take of `given`."""
    kernel.work.ready.wait()
    if combine is None:
        kernel.launch(given)
        return
    given = {**given, "parts_ptr": combine.workspace()}
    kernel.launch(given)
    combine(given)


def empty_kept(q: Tensor) -> Tensor:
    """Room for maxima and inverse sums of the rows, `[2, B, Hq, Nq]`, in fp32; empty in half precision."""
    return q.new_empty((2, *q.shape[:-1]) if q.dtype == torch.float32 else (0,))


def one_number_of(x: Tensor, device: torch.device) -> Tensor:
    """A one-element tensor of which `torch.empty_like` makes tensors like `x`, which is contiguous.

    Passing PyTorch a size and a dtype takes three times as long.
    """
    return torch.empty(1, dtype=x.dtype, device=device).expand(x.shape)


def like(x: Tensor) -> Tensor:
    """A tensor of the same layout on the meta device."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def empty_like(x: Tensor) -> Tensor:
    """A tensor of the layout of `torch.empty_like(x)`, on the meta device."""
    if torch.ops.aten.is_non_overlapping_and_dense(x):
        return like(x)
    return torch.empty_like(like(x))  # imports sympy, 0.3 seconds or more, which else only a backward would

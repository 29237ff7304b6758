"""What every pass of kernels over tensors of one layout does: examples, memory, and launches with their merges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.triton.portable.launches import Bound
from sparseflash.backends.triton.portable.merging import Combine
from sparseflash.blockmask.cache import BoundedDict
from sparseflash.dropout import Dropout

layouts = BoundedDict(256)  # by the direction and everything that they depend on


def run_kernel(
    kernel: Bound, combine: Combine | None, given: Sequence[Any], merged: Sequence[Any], lengths: Tensor | None,
    dropout: Dropout | None, more: Sequence[Any] = (),
) -> None:  # fmt: skip
    """Launches a kernel, and the kernel that merges its chunks if there are any.

    given: the kernel's arguments before lengths and dropout. merged: those of the merge after the partial results; see
    the functions of `merging.py`. more: the kernel's last arguments, which only changed scores have.
    """
    kernel.work.ready.wait()
    if combine is None:
        kernel.launch(*given, *kernel.extra(None, lengths, dropout), *more)
        return
    parts = combine.workspace()
    kernel.launch(*given, *kernel.extra(parts, lengths, dropout), *more)
    combine.launch(parts, *merged)


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

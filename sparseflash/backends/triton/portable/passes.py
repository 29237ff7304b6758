"""Functions that all passes of the portable kernels share: examples, memory, and launches with their merges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.triton.portable.launches import Bound
from sparseflash.backends.triton.portable.merging import Combine
from sparseflash.blockmask.cache import BoundedDict

layouts = BoundedDict(256)  # by "forward" or "backward" and everything else that a layout depends on


def run_kernel(kernel: Bound, combine: Combine | None, given: Mapping[str, Any]) -> None:
    """Launches a kernel, then the kernel that merges its chunks, if any. given: the arguments of both, by name."""
    kernel.work.ready.wait()
    if combine is None:
        kernel.launch(given)
        return
    given = {**given, "parts_ptr": combine.workspace()}
    kernel.launch(given)
    combine(given)


def empty_kept(q: Tensor) -> Tensor:
    """An uninitialised tensor `[2, B, Hq, Nq]` for maxima and inverse sums of rows; in half precision an empty one."""
    return q.new_empty((2, *q.shape[:-1]) if q.dtype == torch.float32 else (0,))

"""A Triton kernel with its grid, compiled once and then launched without the bookkeeping of Triton's own front."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# Multiply-adds rounded once: fewer instructions, smaller errors. Triton's default depends on its version.
OPTIONS = {"enable_fp_fusion": True}
# The compute capability of the oldest GPU that the kernels run on: Ampere, the first with bf16 and asynchronous copies.
OLDEST = (8, 0)


class Prepared:
    """One kernel for arguments of one kind.

    Whoever keeps it sees to it that every call has arguments to which Triton would specialise in the same way: dtypes,
    constants, which pointers are None, and which addresses are multiples of 16 bytes.
    """

    def __init__(self, kernel: Any, programs: int, device: torch.device, num_warps: int, num_stages: int) -> None:
        self.device = device
        self._kernel, self._grid = kernel, (programs, 1, 1)
        self._options = {"num_warps": num_warps, "num_stages": num_stages, **OPTIONS}
        self._compiled: Callable[..., Any] | None = None

    def run(self, *arguments: Any) -> None:
        """Launches; the first time through Triton's own front, which compiles."""
        with on_device(self.device):
            if self._compiled is not None:
                self._compiled(*arguments)
                return
            compiled = self._kernel[self._grid](*arguments, **self._options)
            if compiled is not None:  # the interpreter compiles nothing
                self._compiled = compiled[self._grid]


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Makes a GPU the current one, which is where Triton launches."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()

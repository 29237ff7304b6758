"""A Triton kernel with its grid, compiled once and then launched without the bookkeeping of Triton's own front."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Multiply-adds rounded once: fewer instructions, smaller errors. Triton's default depends on its version.
OPTIONS = {"enable_fp_fusion": True}
# The compute capability of the oldest GPU that the kernels run on: Ampere, the first with bf16 and asynchronous copies.
OLDEST = (8, 0)


class Prepared:
    """One kernel for arguments of one kind.

    Whoever keeps it sees to it that every call has arguments to which Triton would specialise in the same way: dtypes,
    constants, which pointers are None, and which addresses are multiples of 16 bytes.
    """

    def __init__(
        self, kernel: Any, programs: int, device: torch.device, num_warps: int, num_stages: int, registers: int = 0
    ) -> None:
        """registers: the most that a thread may have; 0: no limit."""
        self.device = device
        self._kernel, self._grid = kernel, (programs, 1, 1)
        self._options = {"num_warps": num_warps, "num_stages": num_stages, **OPTIONS}
        if registers:
            self._options["maxnreg"] = registers
        self._start: Callable[..., Any] | None = None

    def run(self, *arguments: Any) -> None:
        """Launches; the first time through Triton's own front, which compiles."""
        with on_device(self.device):
            if self._start is not None:
                self._start(*arguments)
                return
            compiled = self._kernel[self._grid](*arguments, **self._options)
            if compiled is not None:  # the interpreter compiles nothing
                self._start = starter(compiled, self._grid, self.device)

    def bound(self, *last: Any) -> Callable[..., None]:
        """`run` for calls that differ in their first arguments only, which are tensors.

        Of a tensor Triton asks the driver at every launch whether its address is one of the GPU's; numbers it believes.
        """
        if self._start is None:
            return lambda *first: self.run(*first, *last)
        start, index = self._start, self.device.index
        numbers = tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in last)

        def launch(*first: Tensor) -> None:
            if torch._C._cuda_getDevice() == index:
                start(*[x.data_ptr() for x in first], *numbers)
            else:
                self.run(*first, *last)

        return launch


def starter(compiled: Any, grid: tuple[int, int, int], device: torch.device) -> Callable[..., Any]:
    """Launches a compiled kernel on the current stream: what `compiled[grid]` does, at half of its cost for the host.

    That collects for Triton's launch hooks, a profiler's, what they may ask; where there are none nobody does.
    """
    from triton import knobs  # only here, where there is a kernel: the library works where Triton is missing

    plain: Callable[..., Any] = compiled[grid]
    if not launches_as_known(type(compiled.run)):
        return plain
    launcher, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    index, runtime, stream_of = device.index, knobs.runtime, torch._C._cuda_getCurrentRawStream

    def start(*arguments: Any) -> None:
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            plain(*arguments)
        else:
            launcher(*grid, stream_of(index), function, packed, None, None, None, *arguments)

    return start


def launches_as_known(launcher: type) -> bool:
    """Whether a launcher takes what those of Triton 3.6 to 3.9 do. None stands for no hook.

    It is no public interface: of a Triton that changes it we use the slower one.
    """
    names = list(inspect.signature(launcher.__call__).parameters)[1:]
    first = ["gridX", "gridY", "gridZ", "stream", "function"]
    hooked = ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"]
    return names in ([*first, "args"], [*first, *hooked, "args"])


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Makes a GPU the current one, which is where Triton launches."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from sparseflash.backends.triton import api, prepared_call
from sparseflash.backends.triton import device as gpu
from sparseflash.backends.triton.configs import Kernel
from sparseflash.backends.triton.launcher import Launch


class NoDevice:
    """Replaces Triton's driver: answers what the compiler asks about the device."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch  # Triton caches compiled kernels by device number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def stop_at_ptx(*given: Any) -> tuple[str, str] | None:
    """What Triton calls, as `knobs.runtime.add_stages_inspection_hook`, before it compiles."""
    if not given:
        return "ptx", "ptx"
    stages = given[1]
    stages["cubin"] = lambda ptx, metadata: b""
    return None


@contextmanager
def compiling_for(arch: int, only: Kernel | None = None, *, assemble: bool = True) -> Iterator[list[tuple[str, Any]]]:
    """Inside, launches on CPU tensors compile for the architecture and run nothing.

    assemble: also run ptxas, up to a quarter of the work.
    """
    compiled: list[tuple[str, Any]] = []

    def compile_only(self: Launch, programs: int, *given: Any) -> None:
        name = self.variant.function.__name__
        if only is None or name == f"{only}_kernel":
            compiled.append((name, self.variant.compiled(self.arguments(given))))

    with (
        mock.patch.object(driver, "_active", NoDevice(arch)),
        nullcontext() if assemble else mock.patch.object(knobs.runtime, "add_stages_inspection_hook", stop_at_ptx),
        mock.patch.object(Launch, "start", compile_only),
        # Kernels compiled side by side would have to be loaded.
        mock.patch.object(prepared_call, "compile_side_by_side", lambda launches, **how: None),
        mock.patch.object(gpu, "capability_of", lambda device: divmod(arch, 10)),
        mock.patch.object(api, "check", lambda *tensors: None),
    ):
        yield compiled

"""The CUDA driver library, for functions that neither PyTorch nor Triton exposes; loaded on first use."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


@functools.cache
def cuda_driver() -> Any:
    """The driver's functions. Each returns a status code, 0 for success."""
    return ctypes.CDLL("libcuda.so.1")


def raise_if_failed(result: int, doing: str) -> None:
    """Raises RuntimeError, with CUDA's name of the error, unless the status code is 0."""
    if result == 0:
        return
    name = ctypes.c_char_p()
    cuda_driver().cuGetErrorName(result, ctypes.byref(name))
    said = name.value.decode() if name.value else f"error {result}"
    raise RuntimeError(f"the CUDA driver refused {doing}: {said}")

"""The CUDA driver, for what neither PyTorch nor Triton offers; found when it is first needed."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


@functools.cache
def cuda_driver() -> Any:
    """The driver's functions, which return a number: 0 if all is well."""
    return ctypes.CDLL("libcuda.so.1")


def raise_if_failed(result: int, doing: str) -> None:
    """Raises RuntimeError for a number other than 0, with CUDA's name of it."""
    if result == 0:
        return
    name = ctypes.c_char_p()
    cuda_driver().cuGetErrorName(result, ctypes.byref(name))
    said = name.value.decode() if name.value else f"error {result}"
    raise RuntimeError(f"the CUDA driver refused {doing}: {said}")

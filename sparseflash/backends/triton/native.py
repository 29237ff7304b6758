"""Compiles and loads `native.c`, which starts all kernels of a pass by one call.

Compiled as Triton compiles a module of its own, into Triton's cache, under a digest of the source. Where that fails,
Triton's launcher starts kernels, more slowly; `served_by` says which one runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NAME = "sparseflash_native"
_SOURCE = Path(__file__).with_name("native.c")
_lock = threading.Lock()
_found: tuple[Any, str] | None = None
_log = logging.getLogger("sparseflash")


def compiled(flags: Sequence[str] = ()) -> Any:
    """The module compiled from `native.c`, or taken from Triton's cache. flags: further compiler flags, for tests."""
    from triton.runtime.build import compile_module_from_src

    source = _SOURCE.read_text(encoding="utf-8")
    found: Any = compile_module_from_src(source, _NAME, [], [], [], ccflags=list(flags))
    found.connect(Tensor, torch.nn.Parameter)
    return found


class Nothing:
    """Replaces the module if it does not compile. No layout has a key, so no call is cached."""

    @staticmethod
    def layouts(*tensors: Tensor) -> None:
        return None


def module() -> Any:
    """The compiled module, with `Kernel`, `start` and `layouts`; or `Nothing`."""
    return (_found or _load())[0]


def served_by() -> str:
    """What starts kernels, and why if that is not the compiled module."""
    found, why = _found or _load()
    return f"Triton's launcher, because native.c could not be compiled ({why})" if found is Nothing else "compiled C"


def _load() -> tuple[Any, str]:
    global _found
    with _lock:  # one thread compiles
        if _found is None:
            try:
                _found = compiled(), ""
            except Exception as error:  # no Triton, no compiler, no headers of Python, a cache that is read-only, ...
                _found = Nothing, f"{type(error).__name__}: {error}"
                if find_spec("triton") is not None:
                    why = "kernels are started by Triton's launcher, which takes the host longer at every call: %s"
                    _log.warning(why, _found[1])
        return _found

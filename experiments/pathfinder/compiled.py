"""How this package compiles with numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on first use, and keep the machine code beside the source or, if that is read-only, in the user's cache.

    Where there is no place at all to write, every process compiles for itself, which takes it some seconds.

    Numba compiles anew when the file of a function has changed, but not when that of a function it calls has: after
    a change in rng.py, delete `__pycache__`.
    """
    try:
        return numba.njit(cache=True)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return numba.njit(function)

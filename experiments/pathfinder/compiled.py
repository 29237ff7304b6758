"""How this package compiles with numba."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numba

HERE = Path(__file__).parent


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on first use, and keep the machine code for later processes where there is a place to write it.

    Numba's own cache looks at a function's file, but not at the functions and constants of other files that went into
    it: after a change there, old code would draw other images without a word. So every state of this package's sources
    has a cache of its own.
    """
    folder = cache_folder()
    if folder is None:
        return numba.njit(function)
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)  # read when a function is decorated
    try:
        return numba.njit(cache=True)(function)
    finally:
        numba.config.CACHE_DIR = before


@lru_cache(maxsize=1)
def cache_folder() -> Path | None:
    """In NUMBA_CACHE_DIR or beside the sources; None if that is read-only, and then every process compiles anew."""
    sources = blake2b(b"".join(path.read_bytes() for path in sorted(HERE.glob("*.py"))), digest_size=8).hexdigest()
    folder = Path(numba.config.CACHE_DIR or HERE / "__pycache__") / f"numba-{sources}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None

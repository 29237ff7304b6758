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
    """Compile on first use, and cache the machine code for later processes if a folder is writable.

    Numba's cache checks only a function's own file, so every state of this package's sources has its own cache.
    """
    folder = cache_folder()
    if folder is None:
        return numba.njit(function)
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
    try:
        return numba.njit(cache=True)(function)
    finally:
        numba.config.CACHE_DIR = before


@lru_cache(maxsize=1)
def cache_folder() -> Path | None:
    sources = blake2b(b"".join(path.read_bytes() for path in sorted(HERE.glob("*.py"))), digest_size=8).hexdigest()
    folder = Path(numba.config.CACHE_DIR or HERE / "__pycache__") / f"numba-{sources}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None

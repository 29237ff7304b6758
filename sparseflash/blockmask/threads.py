"""Work that PyTorch does not split among threads.

The lists and bits of most masks are short: an operation on them takes less time than its threads take to wait for one
another. `torch.set_num_threads` would be no remedy, because threads that start meanwhile would keep the number. OpenMP,
which splits PyTorch's work on Linux, has a number for each thread.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


@functools.cache
def _setter() -> Callable[[int], Any] | None:
    """OpenMP's setter of the calling thread's number of threads; None where OpenMP is missing."""
    if sys.platform != "linux":
        return None
    # A preloaded OpenMP is in the program's own scope, and then PyTorch uses it, too.
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        try:
            found = ctypes.CDLL(library).omp_set_num_threads
        except (AttributeError, OSError):
            continue
        found.argtypes, found.restype = [ctypes.c_int], None
        return found
    return None


@contextmanager
def one_thread(only_if: bool = True) -> Iterator[None]:
    """Inside the block PyTorch does not split the operations of this thread."""
    threads, set_threads = torch.get_num_threads(), _setter()
    if not only_if or threads == 1 or set_threads is None:
        yield
        return
    set_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() == 1:  # not if the block has called torch.set_num_threads
            set_threads(threads)


def on_one_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function that runs in `one_thread`."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling() or torch.get_num_threads() == 1:  # torch.compile traces no ctypes
            return function(*args, **kwargs)
        with one_thread():
            return function(*args, **kwargs)

    return called

"""Compiles kernels side by side, before they are needed: one after the other they would take twice as long.

Most of a compilation is LLVM's and the assembler's, for which Python's lock is free.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from sparseflash.backends.triton.launcher import BoundLaunch

_THREADS = 4  # a call has at most four kernels that take long


def compile_side_by_side(launches: Iterable[BoundLaunch]) -> None:
    """Starts to compile what these launch, if it is not compiled. Each launch waits for its own."""
    wanted: dict[int, BoundLaunch] = {}
    for launch in launches:
        if launch.launch.variant.is_new():
            wanted.setdefault(id(launch.launch.variant), launch)
    if len(wanted) < 2:  # the one that is needed first may as well be compiled by its launch
        return
    pool = ThreadPoolExecutor(min(_THREADS, len(wanted)), thread_name_prefix="sparseflash-compile")
    for launch in wanted.values():
        launch.launch.variant.compiling = pool.submit(launch.compile)
    pool.shutdown(wait=False)

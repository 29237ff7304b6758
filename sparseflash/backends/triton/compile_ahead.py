"""Compiles kernels in parallel before they are needed, which takes half the time of compiling them one by one.

Most of a compilation runs in LLVM and the assembler, which release the GIL.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from sparseflash.backends.triton.launcher import BoundLaunch

_THREADS = 4  # a call has at most four kernels that take long to compile


def compile_side_by_side(launches: Iterable[BoundLaunch]) -> None:
    """Starts compiling, on other threads, the kernels of these launches that are not compiled yet.

    Each launch waits for its own kernel.
    """
    wanted: dict[int, BoundLaunch] = {}
    for launch in launches:
        if launch.launch.variant.is_new():
            wanted.setdefault(id(launch.launch.variant), launch)
    if len(wanted) < 2:  # a single kernel is compiled by its launch
        return
    pool = ThreadPoolExecutor(min(_THREADS, len(wanted)), thread_name_prefix="sparseflash-compile")
    for launch in wanted.values():
        launch.launch.variant.compiling = pool.submit(launch.compile)
    pool.shutdown(wait=False)

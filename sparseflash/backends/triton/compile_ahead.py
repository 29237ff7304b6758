"""Compiles kernels in parallel before they are needed, which takes half the time of compiling them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from sparseflash.backends.triton.device import refuse_to_record
from sparseflash.backends.triton.launcher import BoundLaunch, Launch

_THREADS = 4  # a call has at most four kernels that take long to compile
_THREADS_FOR_PLANS = 8  # a plan has up to nine that take long together


def compile_side_by_side(launches: Iterable[BoundLaunch], *, fewest: int = 2) -> None:
    """Starts compiling, on other threads, the kernels of these launches that are not compiled yet.

    Each launch waits for its own kernel. fewest: if fewer kernels are not compiled yet, their launches compile them.
    """
    wanted: dict[int, BoundLaunch] = {}
    for launch in launches:
        if launch.launch.variant.is_new():
            wanted.setdefault(id(launch.launch.variant), launch)
    if len(wanted) < fewest:
        return
    pool = ThreadPoolExecutor(min(_THREADS, len(wanted)), thread_name_prefix="sparseflash-compile")
    for launch in wanted.values():
        launch.launch.variant.compiling = pool.submit(launch.compile)
    pool.shutdown(wait=False)


class Rehearsed:
    """Stands in for a launch whose arguments are all passed at each start: compiles its kernel, and starts nothing."""

    def __init__(self, launch: Launch, pool: Executor) -> None:
        self._launch, self._pool = launch, pool

    def start(self, programs: int, *given: Any) -> None:
        variant = self._launch.variant
        if variant.is_new():
            variant.compiling = self._pool.submit(variant.compile, self._launch.arguments(given))


def compile_rehearsed(launches: Sequence[Launch], rehearse: Callable[[Sequence[Any]], object]) -> None:
    """Starts compiling kernels that follow one another side by side, before the first of them runs.

    rehearse: is called with stand-ins for the launches, if a kernel is not compiled yet, and starts them with arguments
    as in the call that follows.
    """
    if not any(each.variant.is_new() for each in launches):
        return
    refuse_to_record(launches[0].variant.device)  # a graph cannot record the loading of code
    pool = ThreadPoolExecutor(min(_THREADS_FOR_PLANS, len(launches)), thread_name_prefix="sparseflash-compile")
    rehearse([Rehearsed(each, pool) for each in launches])
    pool.shutdown(wait=False)

"""Worker processes that use one thread each, and end with their parent process even if it is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from threading import Thread

GRACE = 20  # seconds after SIGTERM, so that the parent can save
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker(SpawnProcess):
    """NumPy's OpenBLAS would start a spinning thread for each core. The libraries read the number when they are
    loaded.
    """

    def start(self) -> None:
        before = {name: os.environ.get(name) for name in THREADS}
        os.environ.update(dict.fromkeys(THREADS, "1"))
        try:
            super().start()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


class _Workers(SpawnContext):
    """Spawned, not forked: the parent may have PyTorch's threads and a GPU, which do not survive a fork."""

    Process = _Worker


def worker_pool(workers: int, initializer: Callable[[], None] | None = None) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=_Workers(), initializer=_begin, initargs=(initializer,))


def _begin(initializer: Callable[[], None] | None) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    if initializer is not None:
        initializer()


def _end_with_parent() -> None:
    """Otherwise it would wait for its next task forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def leave_signals_to_parent() -> None:
    """The parent needs batches until it stops.

    SIGTERM ends the process later: if another worker has died, the pool waits for this one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(GRACE))

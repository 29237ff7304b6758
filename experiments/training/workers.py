"""Worker processes that end when the process that started them ends, even if it was killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from threading import Thread

GRACE = 20  # seconds that a worker continues after a SIGTERM, so that its parent can save


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_pool(workers: int, initializer: Callable[[], None] | None = None) -> ProcessPoolExecutor:
    """A pool of processes that work until it is shut down. initializer: called first in each of them."""
    # Spawned, not forked: the parent may have PyTorch's threads and a GPU, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(initializer,))


def _begin(initializer: Callable[[], None] | None) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    if initializer is not None:
        initializer()


def _end_with_parent() -> None:
    """Without this, a worker whose parent was killed would wait for its next task forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def leave_signals_to_parent() -> None:
    """Keep working when an interrupt or SIGTERM reaches all processes at once: the parent needs batches until it stops.

    SIGTERM still ends the process, but later: if another worker has died, the pool waits for this one to end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(GRACE))

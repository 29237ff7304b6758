"""Worker processes, which end when the process that started them does, even by a kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from threading import Thread

GRACE = 20  # seconds that a worker outlives a SIGTERM, for its parent to save


def worker_pool(workers: int, initializer: Callable[[], None] | None = None) -> ProcessPoolExecutor:
    """Processes that work until the pool is shut down. initializer: called in each of them first."""
    # Spawned, not forked: the parent may hold PyTorch's threads, and maybe a GPU, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(initializer,))


def _begin(initializer: Callable[[], None] | None) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    if initializer is not None:
        initializer()


def _end_with_parent() -> None:
    """A worker waits for its next task for ever, also when nobody is left to give one."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def leave_signals_to_parent() -> None:
    """Work on when an interrupt or SIGTERM comes to all processes at once: the parent needs batches until it stops.

    SIGTERM ends the process after all, but later, as the pool waits for that when another worker has died.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(GRACE))

"""SIGTERM, by which schedulers and `kill` end a process, as a question that a training run can ask."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def told_to_end() -> Iterator[Callable[[], bool]]:
    """Inside, SIGTERM ends nothing: the function that this yields says whether it has come.

    Only the main thread can receive signals; in another one, all stays as it is, and the answer is no.
    """
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield told.is_set
        return

    def tell(number: int, frame: FrameType | None) -> None:
        told.set()

    before = signal.signal(signal.SIGTERM, tell)
    try:
        yield told.is_set
    finally:
        signal.signal(signal.SIGTERM, before)

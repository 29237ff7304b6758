"""SIGTERM, with which schedulers and `kill` end a process, as a condition that a training run can check."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_caught() -> Iterator[Callable[[], bool]]:
    """Inside the context, SIGTERM does not end the process; the function that this yields says whether it was received.

    Only the main thread receives signals. In any other thread nothing changes and the answer is always False.
    """
    received = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield received.is_set
        return

    def handle(number: int, frame: FrameType | None) -> None:
        received.set()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield received.is_set
    finally:
        signal.signal(signal.SIGTERM, before)

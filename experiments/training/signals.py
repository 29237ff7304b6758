"""SIGTERM, by which schedulers and `kill` end a process, as a question that a training run can ask."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_caught() -> Iterator[Callable[[], bool]]:
    """Inside, SIGTERM does not end the process: the function that this yields says whether it has come.

    Only the main thread receives signals. In another one nothing changes, and the answer is always no.
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

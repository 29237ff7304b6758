"""SIGTERM (from schedulers and `kill`) and Ctrl-C as a condition that a training run can check."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NOTE = b"\nStops and saves after this step; press Ctrl-C again to stop without saving.\n"


@contextmanager
def stop_caught() -> Iterator[Callable[[], bool]]:
    """SIGTERM and the first Ctrl-C do not end the process. Yields whether one was received.

    A second Ctrl-C has its previous effect; SIGINT stays ignored where it was. Other threads receive no signals.
    """
    received = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield received.is_set
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, frame: FrameType | None) -> None:
        received.set()
        if number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT])
            if os.environ.get("RANK", "0") == "0":
                os.write(2, NOTE)  # sys.stderr's write may have been interrupted

    signal.signal(signal.SIGTERM, handle)
    if before[signal.SIGINT] is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handle)
    try:
        yield received.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Seconds of work on a device that runs behind the host."""

from __future__ import annotations

import time

import torch


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work; return at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Measures the seconds since it was created."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.started = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds until now, without waiting for the device."""
        return time.perf_counter() - self.started

    def leave_out(self, seconds: float) -> None:
        self.started += seconds

    def finish(self) -> float:
        """Wait for the queued work of the device, and return the seconds until then."""
        synchronize(self.device)
        return self.elapsed()

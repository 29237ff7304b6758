"""Seconds of work on a device that runs behind the host."""

from __future__ import annotations

import time

import torch


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work; on the CPU there is nothing to wait for."""
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
        """Subtract this many seconds from the time until now."""
        self.started += seconds

    def finish(self) -> float:
        """Seconds until the device has finished its queued work, which this waits for."""
        synchronize(self.device)
        return self.elapsed()

"""Seconds of work on a device that runs behind the host."""

from __future__ import annotations

import time

import torch


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was given; on the CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Runs from when it is made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.started = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds until now, by the host."""
        return time.perf_counter() - self.started

    def leave_out(self, seconds: float) -> None:
        """Do not count so many of the seconds until now."""
        self.started += seconds

    def finish(self) -> float:
        """Seconds until the device has done what it was given."""
        synchronize(self.device)
        return self.elapsed()

from __future__ import annotations

import time

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.started = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def leave_out(self, seconds: float) -> None:
        self.started += seconds

    def finish(self) -> float:
        synchronize(self.device)
        return self.elapsed()

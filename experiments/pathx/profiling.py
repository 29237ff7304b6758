"""Which kernels the time of a training step goes into, by PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from experiments.speed.timing import synchronize


class Cost(NamedTuple):
    """Of one kernel, or on a CPU of one operation."""

    name: str
    ms: float  # a step, all calls together
    calls: float  # a step


def costs_of(step: Callable[[int], object], steps: int, device: torch.device) -> list[Cost]:
    """What `step(number)` runs on the device for steps 0, 1, ...: the longest first.

    On a GPU the times are those of its kernels, and what it waits between them is in none.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as record:
        for number in range(steps):
            step(number)
        synchronize(device)
    found = []
    for event in record.key_averages():
        if on_gpu and event.device_type != torch.autograd.DeviceType.CUDA:
            continue  # an operation has the time of its kernels, too
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        found.append(Cost(event.key, us / 1000 / steps, event.count / steps))
    return sorted(found, key=lambda cost: -cost.ms)

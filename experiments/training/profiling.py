"""The time of each kernel of a training step, by PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # public, but not annotated so
from torch.profiler import ProfilerActivity, profile

from experiments.training.clock import synchronize


class KernelCost(NamedTuple):
    name: str
    ms: float  # a step, all calls together
    calls: float  # a step


def costs_of(step: Callable[[int], object], steps: int, device: torch.device) -> list[KernelCost]:
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as record:
        for number in range(steps):
            step(number)
        synchronize(device)
    found = []
    for event in record.key_averages():
        if on_gpu and event.device_type != DeviceType.CUDA:
            continue
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        found.append(KernelCost(event.key, us / 1000 / steps, event.count / steps))
    return sorted(found, key=lambda cost: -cost.ms)

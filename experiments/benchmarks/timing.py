"""Milliseconds of a call: medians of times between CUDA events, with implementations in turns.

Each implementation runs a short series, then the next one, for some rounds, so that a change of clock rates affects
all. Before a measured launch the L2 cache is flushed and the GPU sleeps shortly, so that events time the GPU and not
the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import torch

from experiments.training.clock import synchronize

T = TypeVar("T")

FLUSH_BYTES = 256 * 2**20  # five times the L2 cache of an H100
SLEEP_CYCLES = 1_200_000  # about 0.6 ms, longer than the host takes for a step
LAUNCHES_A_ROUND = (4, 40)


@dataclass(frozen=True)
class Timed:
    """A call, and the context to enter around a series of calls."""

    call: Callable[[], object]
    context: Callable[[], AbstractContextManager[object]]


@dataclass
class Timing:
    """The median in ms, and in `spread` the range of the rounds' medians over it; or the failure."""

    ms: float = float("nan")
    spread: float = float("nan")
    failure: Exception | None = None
    rounds: list[list[float]] = field(default_factory=list)  # milliseconds

    def finish(self) -> None:
        self.ms = median(sample for samples in self.rounds for sample in samples)
        medians = [median(samples) for samples in self.rounds]
        self.spread = (max(medians) - min(medians)) / self.ms


def first_call(call: Callable[[], T], device: torch.device) -> tuple[float, T]:
    synchronize(device)
    begin = time.perf_counter()
    result = call()
    synchronize(device)
    return time.perf_counter() - begin, result


def recorded(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph, with the same result tensors every time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _series(call: Callable[[], object], count: int, device: torch.device, flush: torch.Tensor | None) -> list[float]:
    if flush is None:
        return [first_call(call, device)[0] * 1e3 for _ in range(count)]
    begins = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
    for begin, end in zip(begins, ends):
        flush.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) for begin, end in zip(begins, ends)]


def in_turns(calls: Mapping[str, Timed], device: torch.device, *, rounds: int, round_ms: float) -> dict[str, Timing]:
    """`rounds` series of about `round_ms` milliseconds each, or of one launch if 0, in turns."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None
    fewest, most = LAUNCHES_A_ROUND

    def series(call: Callable[[], object]) -> list[float]:
        if round_ms == 0:
            return _series(call, 1, device, flush)
        warm_ms = min(_series(call, 2, device, flush))
        return _series(call, min(max(int(round_ms / warm_ms), fewest), most), device, flush)

    return _by_turns(calls, rounds, series)


def of_single_calls(calls: Mapping[str, Timed], device: torch.device, *, rounds: int, count: int) -> dict[str, Timing]:
    """Host time of a call, in turns: a loop of `count` calls and a synchronisation, divided by `count`."""

    def series(call: Callable[[], object]) -> list[float]:
        for _ in range(3):
            call()
        seconds, _ = first_call(lambda: [call() for _ in range(count)], device)
        return [seconds / count * 1e3]

    return _by_turns(calls, rounds, series)


def host_microseconds(call: Callable[[], object], device: torch.device, *, count: int = 20, rounds: int = 5) -> float:
    """The median host time of a call, without waiting for the device."""
    found: list[float] = []
    for _ in range(rounds):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - begin) / count * 1e6)
        synchronize(device)
    return median(found)


def _by_turns(
    calls: Mapping[str, Timed], rounds: int, series: Callable[[Callable[[], object]], list[float]]
) -> dict[str, Timing]:
    timings = {name: Timing() for name in calls}
    for _ in range(rounds):
        for name, timed in calls.items():
            timing = timings[name]
            if timing.failure is not None:
                continue
            try:
                with timed.context():
                    timing.rounds.append(series(timed.call))
            except Exception as failure:
                timing.failure = failure
    for timing in timings.values():
        if timing.failure is None:
            timing.finish()
    return timings

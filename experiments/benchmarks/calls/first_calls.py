"""The first calls of a new process with empty caches: the time that a user waits, including compilation."""

from __future__ import annotations

import torch

from experiments.benchmarks.calls.ways import BOTH, FIRST_CALLS, IMPLEMENTATIONS_OF, INFERENCE, Shape, calls_of
from experiments.benchmarks.fresh_process import answer_of
from experiments.benchmarks.harness import Bench
from experiments.benchmarks.timing import first_call


def record_first_calls(bench: Bench, name: str, *, limit: float = 240.0) -> None:
    """Seconds of FIRST_CALLS of one implementation, one after another, in a new process."""
    seconds: dict[str, float] = {}
    failure = ""
    try:
        seconds = answer_of(seconds_of, name, limit=limit)
    except RuntimeError as failed:
        failure = str(failed)
    for what in FIRST_CALLS:
        bench.add(f"{what}/{name}", seconds.get(what), "s", failure=failure)
    bench.save()


def seconds_of(name: str) -> dict[str, float]:
    """Measures in this process."""
    device = torch.device("cuda")
    # Initialising the device and its libraries is not part of the measurement.
    x = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()
    seconds = {}
    for what, dim, way in zip(FIRST_CALLS, (64, 32, 128), (BOTH, BOTH, INFERENCE), strict=True):
        call = calls_of(IMPLEMENTATIONS_OF[name](Shape(dim=dim), device), Shape(dim=dim), device)[way]
        seconds[what], _ = first_call(call, device)
    return seconds

"""The first calls of a new process with empty caches: what a user waits for, kernels' compilation and all.

`python -m experiments.benchmarks.calls.first_calls NAME` is the process itself; it prints its seconds as JSON.
"""

from __future__ import annotations

import json
import sys

import torch

from experiments.benchmarks.calls.ways import BOTH, IMPLEMENTATIONS_OF, INFERENCE, Shape, calls_of
from experiments.benchmarks.fresh_process import output_of
from experiments.benchmarks.timing import first_call

FIRST = "first forward and backward"
VARIANT = "the same of another head dim"
ONLY_FORWARD = "inference, a third head dim"
FIRST_CALLS = (FIRST, VARIANT, ONLY_FORWARD)


def seconds_of(name: str, limit: float = 240.0) -> dict[str, float]:
    """Seconds of FIRST_CALLS of one implementation, one after another, in a process of their own."""
    answer = output_of("experiments.benchmarks.calls.first_calls", name, limit=limit)
    found: dict[str, float] = json.loads(answer.splitlines()[-1])
    return found


def main(name: str) -> None:
    """Measures in this process."""
    device = torch.device("cuda")
    # The context of the device and its libraries are not what is measured.
    x = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()
    seconds = {}
    for what, dim, way in zip(FIRST_CALLS, (64, 32, 128), (BOTH, BOTH, INFERENCE), strict=True):
        call = calls_of(IMPLEMENTATIONS_OF[name](Shape(dim=dim), device), Shape(dim=dim), device)[way]
        seconds[what], _ = first_call(call, device)
    print("\n" + json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

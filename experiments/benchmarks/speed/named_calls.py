"""Calls with names, ours and those of peers, timed in turns: for benchmarks whose cases are not those of `speed`."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from experiments.benchmarks.speed.candidate import verdict_of
from experiments.benchmarks.timing import Timed, Timing, in_turns


def timed_rows(
    case: str, runs: Mapping[str, Callable[[], object]], failures: Mapping[str, Exception], peers: Container[str],
    numbers: Callable[[str, Timing], dict[str, float]], device: torch.device, *, round_ms: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each of `runs`: its milliseconds, their spread and more `numbers`. A peer that fails, or has failed
    already, has the reason instead; a failure of ours is raised.
    """
    timed = {name: Timed(run, nullcontext) for name, run in runs.items() if name not in failures}
    timings = in_turns(timed, device, rounds=3, round_ms=round_ms)
    rows = []
    for name in runs:
        row: dict[str, Any] = {"case": case, "call": name}
        failed = failures[name] if name in failures else timings[name].failure
        if failed is None:
            timing = timings[name]
            row |= {"ms": timing.ms, "spread": timing.spread} | numbers(name, timing)
        elif name in peers:
            row["error"] = ": ".join(verdict_of(failed))
        else:
            raise failed
        rows.append(row)
    return rows

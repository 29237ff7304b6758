"""Rows of the table: each case's cost by the model, by the counters, and by the clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from experiments.benchmarks import timing
from experiments.benchmarks.io.cases import DENSE, STANDARD, Case
from experiments.benchmarks.io.counters import NoCountersError, counted
from experiments.benchmarks.io.implementations import calls_of
from experiments.benchmarks.io.model import Cost, cost

PASSES = ("forward", "both")


@dataclass
class Row:
    """The costs of a case. Numbers that were not measured are None, and `reason` says why."""

    case: Case
    cost: Cost
    density: float
    forward_ms: float | None = None
    both_ms: float | None = None
    forward_hbm: float | None = None  # bytes
    both_hbm: float | None = None
    forward_l2: float | None = None
    both_l2: float | None = None
    reason: str = ""


def measure(
    cases: Sequence[Case],
    device: torch.device,
    *,
    counters: bool = True,
    rounds: int = 3,
    round_ms: float = 60.0,
    done: Callable[[], None] = lambda: None,
) -> list[Row]:
    """One row for each case, timed in turns. `done` is called once for the counters of each case, and once for the
    times.
    """
    rows = [Row(case, cost(case), case.mask().density) for case in cases]
    for row in rows:
        if counters:
            _count(row)
        done()
    for which in PASSES:
        _time(rows, which, device, rounds, round_ms)
    done()
    return rows


def _count(row: Row) -> None:
    try:
        for which in PASSES:
            found = counted(row.case, which)
            setattr(row, f"{which}_hbm", found.hbm)
            setattr(row, f"{which}_l2", found.l2)
    except NoCountersError as failure:
        row.reason = str(failure)


def _time(rows: Sequence[Row], which: str, device: torch.device, rounds: int, round_ms: float) -> None:
    calls = {}
    for number, row in enumerate(rows):
        try:
            call = getattr(calls_of(row.case, device), which)
            call()
        except Exception as failure:  # that standard attention runs out of memory is a result
            row.reason = "; ".join(filter(None, (row.reason, f"{which}: {str(failure).splitlines()[0][:120]}")))
            continue
        calls[str(number)] = timing.Timed(call, nullcontext)
    for number, found in timing.in_turns(calls, device, rounds=rounds, round_ms=round_ms).items():
        row = rows[int(number)]
        if found.failure is None:
            setattr(row, f"{which}_ms", found.ms)
        else:
            row.reason = "; ".join(filter(None, (row.reason, f"{which}: {found.failure}")))


def largest_difference(case: Case, device: torch.device) -> float:
    """The difference between standard attention and ours dense, in out and gradients, relative to the largest value."""
    standard, ours = (calls_of(Case(kind, None, *_shape(case)), device).both() for kind in (STANDARD, DENSE))
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(standard, ours, strict=True))


def _shape(case: Case) -> tuple[int, int, int, int, int, torch.dtype]:
    return case.batch, case.heads, case.length, case.head_dim, case.block, case.dtype

"""The learning rate over a run, as a factor of its peak."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "cosine", "linear", "rsqrt")


def factor(schedule: str, step: int, warmup: int, progress: float) -> float:
    """The factor for step `step` (from 0).

    All rise linearly over `warmup` steps, to 1. Then "constant" stays there; "cosine" and "linear" fall from there to
    0 as progress, the part of the run that is done, goes to 1; "rsqrt" falls as sqrt(warmup / step), the Long Range
    Arena's own.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"the schedule must be one of {', '.join(SCHEDULES)}; got {schedule!r}")
    if step < warmup:
        return (step + 1) / warmup
    fallen = decayed(step, warmup, progress)
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * fallen))
    if schedule == "linear":
        return 1 - fallen
    if schedule == "rsqrt":
        return math.sqrt(max(1, warmup) / (step + 1))
    return 1.0


def decayed(step: int, warmup: int, progress: float) -> float:
    """The part that is done of what follows the warm-up, for a step after it.

    A run may end by its time, so where the warm-up ended is known from its share of the steps until now.
    """
    progress = min(1.0, progress)
    risen = progress * warmup / max(1, step)
    return 1.0 if risen >= 1 else (progress - risen) / (1 - risen)

"""The learning rate over a run, as a factor of its peak."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "cosine", "linear", "rsqrt")


def factor(schedule: str, step: int, warmup: int, progress: float) -> float:
    """The factor for step `step` (from 0).

    All rise linearly over `warmup` steps. Then "constant" stays at 1; "cosine" and "linear" fall to 0 as
    progress, the part of the run that is done, goes to 1; "rsqrt" falls as sqrt(warmup / step), the Long Range
    Arena's own.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"the schedule must be one of {', '.join(SCHEDULES)}; got {schedule!r}")
    rise = min(1.0, (step + 1) / max(1, warmup))
    if schedule == "cosine":
        return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    if schedule == "linear":
        return rise * (1 - min(1.0, progress))
    if schedule == "rsqrt":
        return rise * math.sqrt(max(1, warmup) / max(step + 1, warmup, 1))
    return rise

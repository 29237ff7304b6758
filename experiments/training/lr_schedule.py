from __future__ import annotations

import math

SCHEDULES = ("constant", "cosine", "linear", "rsqrt", "trapezoid")
DECAY_SHARE = 0.2  # a trapezoid falls to 0


def factor(schedule: str, step: int, warmup: int, progress: float) -> float:
    """For step `step` (from 0).

    >>> [factor("linear", step, 2, step / 10) for step in (0, 1, 6)]
    [0.5, 1.0, 0.5]
    >>> [factor("trapezoid", step, 2, step / 10) for step in (0, 7, 10)]
    [0.5, 1.0, 0.0]

    All schedules rise linearly to 1 over `warmup` steps. `progress` is the finished share of the run.

    - "constant" stays at 1.
    - "cosine" and "linear" fall to 0 at progress 1.
    - "trapezoid" falls linearly to 0 in the last fifth. Before that, runs of different lengths are comparable.
    - "rsqrt" falls as sqrt(warmup / step), the schedule of the Long Range Arena.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"the schedule must be one of {', '.join(SCHEDULES)}; got {schedule!r}")
    if step < warmup:
        return (step + 1) / warmup
    decayed = decay_progress(step, warmup, progress)
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * decayed))
    if schedule == "linear":
        return 1 - decayed
    if schedule == "trapezoid":
        return min(1.0, (1 - decayed) / DECAY_SHARE)
    if schedule == "rsqrt":
        return math.sqrt(max(1, warmup) / (step + 1))
    return 1.0


def decay_progress(step: int, warmup: int, progress: float) -> float:
    """A run may be limited by time: progress at the end of the warm-up is estimated from its share of the steps."""
    progress = min(1.0, progress)
    at_warmup = progress * warmup / max(1, step)
    return 1.0 if at_warmup >= 1 else (progress - at_warmup) / (1 - at_warmup)

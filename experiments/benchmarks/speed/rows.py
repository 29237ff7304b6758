"""The results of a case as rows; each row is one measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from experiments.benchmarks.speed.cases import CALL, FIRST, MEMORY, Case
from experiments.measurements import Measurement

OURS = "sparseflash"
OK, WRONG, FAILED, SKIPPED, DIFFERS, NOT_RUN = "ok", "WRONG", "FAILED", "skipped", "DIFFERS", "not run"
_UNITS = {CALL: "us", MEMORY: "MiB", **dict.fromkeys(FIRST, "s")}  # of other passes: ms


@dataclass
class Row:
    """One case, one implementation, one pass. Numbers that do not exist are None.

    `ratio`: how many times as fast as the peer ours is. `error`: of our result, in units of the yardstick of check.py,
    at most 1. `difference`: the relative difference of a peer from ours.
    """

    case: Case
    peer: str
    direction: str
    status: str
    density: float | None = None
    ms: float | None = None
    spread: float | None = None  # range of the rounds' medians over the median
    flops: float | None = None  # useful ones of a call
    ratio: float | None = None
    memory_mib: float | None = None  # peak of a forward and a backward, including inputs and mask
    first_call_s: float | None = None  # seconds, including compilation
    error: float | None = None
    difference: float | None = None
    checked: str = ""  # the part of ours that was compared with fp64
    reason: str = ""

    @property
    def measurement(self) -> Measurement:
        """The row in the record."""
        unit = _UNITS.get(self.direction, "ms")
        ms = None if self.ms is None else self.ms * {"us": 1e3, "s": 1e-3}.get(unit, 1.0)
        value = self.memory_mib if self.direction == MEMORY else ms
        name = f"speed/{self.case.path}/{self.direction.replace(' ', '-')}/{self.peer}"
        failure = "" if value is not None else ": ".join(filter(None, (self.status, self.reason)))
        known: dict[str, Any] = {
            "live": self.density, "flops": self.flops, "error": self.error, "difference": self.difference,
            "checked": self.checked or None, "first_call_s": None if unit == "s" else self.first_call_s,
        }  # fmt: skip
        settings = self.case.settings | {what: value for what, value in known.items() if value is not None}
        return Measurement(name, value, None if failure else self.spread, unit, settings, failure=failure)

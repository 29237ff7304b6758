"""The wait for the first result with a score modification: seconds, in a new process with empty caches."""

from __future__ import annotations

from experiments.benchmarks.fresh_process import answer_of
from experiments.benchmarks.interpreter import run_kernels_on
from experiments.benchmarks.scores.cases import calls
from experiments.benchmarks.scores.ways import PLAIN, Sizes, Ways
from experiments.benchmarks.timing import first_call


def seconds_of(name: str, library: str, sizes: Sizes) -> dict[str, float]:
    """Seconds until each first result of a case, the forward's and then the backward's, by CASE-PASS/WAY, after those
    of plain attention.

    A case thus pays only for its own kernels, as for a user of plain attention who adds a modification. {} where the
    library cannot express the case. Raises RuntimeError if the process fails.
    """
    found: dict[str, float] = answer_of(measured, name, library, sizes)
    return found


def measured(name: str, library: str, sizes: Sizes) -> dict[str, float]:
    """Measures in this process."""
    ways = Ways(sizes)
    run_kernels_on(ways.place.type)
    (case,) = ways.cases([name])
    seconds = {}
    changed = ways.changed(case, library)
    for label, way in ((PLAIN, ways.plain(library)), (name, changed)) if changed is not None else ():
        for what, call in calls(way.run, way.wanted, ways.dout).items():
            seconds[f"{label}-{what}/{library}"], _ = first_call(call, ways.place)
    return seconds

"""How long one waits for the first result with changed scores: seconds, in a new process with empty caches.

`python -m experiments.benchmarks.scores.first_use QUESTION` is the process itself; it prints its seconds as JSON.
"""

from __future__ import annotations

import json
import sys

from experiments.benchmarks.fresh_process import answer_in, output_of, print_answer
from experiments.benchmarks.interpreter import run_kernels_on
from experiments.benchmarks.scores.cases import calls
from experiments.benchmarks.scores.ways import PLAIN, Sizes, Ways
from experiments.benchmarks.timing import first_call


def seconds_of(case: str, library: str, sizes: Sizes, *, limit: float = 240.0) -> dict[str, float]:
    """Seconds until each first result of a case, the forward's and then the backward's, by PASS/WAY, after those of
    plain attention.

    So a case pays for what it needs besides plain attention, as if one had worked with the library before and now
    writes a new change. {} where the library cannot express the case. Raises RuntimeError if the process fails or takes
    longer than `limit` seconds.
    """
    found: dict[str, float] = answer_in(output_of(__name__, json.dumps([case, library, *sizes]), limit=limit))
    return found


def main(question: str) -> None:
    """Measures in this process."""
    name, library, *sizes = json.loads(question)
    ways = Ways(Sizes(*sizes))
    run_kernels_on(ways.place.type)
    (case,) = ways.cases([name])
    seconds = {}
    changed = ways.changed(case, library)
    for label, way in ((PLAIN, ways.plain(library)), (name, changed)) if changed is not None else ():
        for what, call in calls(way.run, way.wanted, ways.dout).items():
            seconds[f"{label}-{what}/{library}"], _ = first_call(call, ways.place)
    print_answer(seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])

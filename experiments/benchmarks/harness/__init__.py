"""The harness of all benchmarks: checks the ways of computing a case, times them in turns and records them.

A benchmark is one module, or one folder, that lists its cases and for each case the ways of computing it:

    @app.command()
    def main(device: Device = "cuda", commit: Commit = None, out: Out = Path("runs/mine")) -> None:
        bench = Bench.start("mine", device, commit, out)
        for case in CASES:
            bench.time(case.name, {"sparseflash": Way(ours(case)), "SDPA": Way(theirs(case), like="sparseflash")})
        bench.finish()

It writes `runs/mine/mine.jsonl`, in the form of experiments.measurements, after every case.
"""

from experiments.benchmarks.harness.bench import Bench
from experiments.benchmarks.harness.options import (
    Cases,
    Commit,
    Device,
    Minutes,
    Out,
    Rounds,
    Seed,
    chosen,
    deadline,
    matching,
    separated,
)  # fmt: skip
from experiments.benchmarks.harness.ways import SAME_FUNCTION, Unavailable, Way, difference, failure_of, passes, reason
from experiments.measurements import slug

__all__ = [
    "SAME_FUNCTION", "Bench", "Cases", "Commit", "Device", "Minutes", "Out", "Rounds", "Seed", "Unavailable", "Way",
    "chosen", "deadline", "difference", "failure_of", "matching", "passes", "reason", "separated", "slug",
]  # fmt: skip

"""Random calls of the public API: each must give a right result, or one clear error raised by the library itself.

    python -m tests.fuzzing --calls 20000 --seconds 540 --record calls.json [--device cuda]

runs more calls than the tests do. With `--record`, a later run continues with other seeds. An error counts as the
library's own if its `raise` raised it, as ValueError, TypeError, NotImplementedError or RuntimeError, with a text; any
other is a bug.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import Counter
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, seed, settings

from tests.fuzzing import of_attention, of_masks, values

FAMILIES = {
    name.removeprefix("fuzz_"): each
    for name, each in sorted({**vars(of_attention), **vars(of_masks)}.items())
    if hasattr(each, "strategies")
}


def stop_if_device_failed(family, number, drawn):
    if values.DEVICE.type == "cuda":
        try:
            torch.cuda.synchronize(values.DEVICE)
        except RuntimeError as error:
            print(f"{family}, seed {number}: {error}\nin or after the call of {drawn}", flush=True)
            os._exit(2)  # leaving in order would free memory of the lost GPU


def run(family, examples, number=None, ends=None, **options):
    ends = Counter() if ends is None else ends
    wild = FAMILIES[family]

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), **options)
    @given(**wild.strategies)
    def counted(**drawn):
        try:
            end = wild(**drawn)
        except Exception:
            ends["failure"] += 1
            stop_if_device_failed(family, number, drawn)
            raise
        stop_if_device_failed(family, number, drawn)
        ends[end] += 1

    (counted if number is None else seed(number)(counted))()
    return ends


CALLS = 100


def one_turn(family, number):
    ends = Counter()
    try:
        return run(family, CALLS, number, ends, deadline=None, database=None), []
    except Exception as failure:
        failures = getattr(failure, "exceptions", [failure])
        notes = ["".join(getattr(each, "__notes__", [])[:1]) for each in failures]
        what = [f"{type(each).__name__}: {each} {note}" for each, note in zip(failures, notes)]
        return ends, [f"{family}, seed {number}: {text}" for text in what]


def table(ends):
    total = Counter()
    for family, counts in sorted(ends.items()):
        total.update(counts)
        yield f"{family:>20}: {sum(counts.values()):6} calls, {counts.get('result', 0):6} results"
    yield f"{'all':>20}: {total.total():6} calls, {total['result']:6} results"


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzzing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=10_000, help="of all families together, those recorded included")
    parser.add_argument("--seconds", type=float, default=math.inf, help="the last turn is begun before")
    parser.add_argument("--record", type=Path, help="a JSON file of what was done, also by earlier runs")
    parser.add_argument("--seed", type=int, default=0, help="of the first turn, without a record")
    parser.add_argument("--device", type=torch.device, default=values.DEVICE, help="of tensors and masks")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="by default all")
    chosen = parser.parse_args()
    values.DEVICE = chosen.device
    families = chosen.family or list(FAMILIES)
    done = {"seed": chosen.seed, "ends": {}, "failures": []}
    if chosen.record and chosen.record.exists():
        done = json.loads(chosen.record.read_text())
    start = time.perf_counter()
    while sum(sum(counts.values()) for counts in done["ends"].values()) < chosen.calls:
        if time.perf_counter() - start > chosen.seconds:
            break
        family = families[done["seed"] % len(families)]
        ends, failures = one_turn(family, done["seed"])
        print(*failures, sep="\n", end="\n" if failures else "", flush=True)
        done["seed"] += 1
        done["ends"][family] = Counter(done["ends"].get(family, {})) + ends
        done["failures"] += failures
        if chosen.record:
            chosen.record.write_text(json.dumps(done, indent=1))
    print(*table(done["ends"]), f"{len(done['failures'])} failures", sep="\n")
    return 1 if done["failures"] else 0

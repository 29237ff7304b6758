"""Random calls of the public API: each must give a right result, or one clear error raised by the library itself.

    pytest tests/fuzzing -k wild --hypothesis-profile=long    more calls than usual
    python -m tests.fuzzing --device cuda --calls 1000        calls on a GPU

An error counts as the library's own if its `raise` raised it, as ValueError, TypeError, NotImplementedError or
RuntimeError, with a text; any other is a bug.
"""

from __future__ import annotations

import argparse
import os

import torch
from hypothesis import HealthCheck, given, seed, settings

from tests.fuzzing import of_attention, of_masks, values

FAMILIES = {
    name.removeprefix("fuzz_"): each
    for name, each in sorted({**vars(of_attention), **vars(of_masks)}.items())
    if hasattr(each, "strategies")
}


def stop_if_device_failed(family, drawn):
    if values.DEVICE.type == "cuda":
        try:
            torch.cuda.synchronize(values.DEVICE)
        except RuntimeError as error:
            print(f"{family}: {error}\nin or after the call of {drawn}", flush=True)
            os._exit(2)  # leaving in order would free memory of the lost GPU


def run(family, examples, **options):
    wild = FAMILIES[family]

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), **options)
    @given(**wild.strategies)
    def checked(**drawn):
        try:
            wild(**drawn)
        finally:
            stop_if_device_failed(family, drawn)

    return checked


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description="Random calls of the public API.")
    parser.add_argument("--calls", type=int, default=1000, help="of each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=values.DEVICE, help="of tensors and masks")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="by default all")
    chosen = parser.parse_args()
    values.DEVICE = chosen.device
    for family in chosen.family or FAMILIES:
        seed(chosen.seed)(run(family, chosen.calls, deadline=None, database=None))()
        print(f"{family}: {chosen.calls} calls", flush=True)

"""Results of attention, judged by the library's yardstick, and a record of long runs."""

import json
import os
from typing import NamedTuple

import torch

from sparseflash.testing import error_in_yardsticks

NAMES = ("out", "lse", "dq", "dk", "dv")


class Results(NamedTuple):
    """What an attention gives: `out`, `lse` and the three gradients."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def assert_exact(got, truth, plain_errors, label, score_magnitude=0.0):
    """Every result of `got` is within its yardstick; `label` goes to the record of a long run.

    `score_magnitude`, the largest sum of absolute products that makes a score, is the magnitude of lse.
    """
    magnitudes = [score_magnitude if name == "lse" else 0.0 for name in NAMES]
    rows = zip(NAMES, got, truth, plain_errors, magnitudes, strict=True)
    ratios = {name: error_in_yardsticks(*xs) for name, *xs in rows}
    _record(label, ratios)
    too_far = {name: round(ratio, 3) for name, ratio in ratios.items() if not ratio <= 1.0}
    assert not too_far, f"error in yardsticks, at most 1 allowed: {too_far}"


def _record(label, ratios):
    """Appends to a file that experiments.benchmarks.exactness reads, if SPARSEFLASH_EXACTNESS names a folder."""
    folder = os.environ.get("SPARSEFLASH_EXACTNESS")
    if folder:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"{os.getpid()}.jsonl"), "a") as file:
            file.write(json.dumps({**label, **ratios}) + "\n")

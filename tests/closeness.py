"""Results of attention, judged by the library's yardstick, and a record of long runs."""

import json
import os
from typing import NamedTuple

import torch

from sparseflash.testing import compare_results


class Results(NamedTuple):
    """What an attention gives: `out`, `lse` and the three gradients."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


NAMES = Results._fields


def assert_exact(got, truth, plain_errors, label, score_magnitude=0.0):
    """Every result of `got` is within its yardstick; `label` goes to the record of a long run.

    `plain_errors(until)`: those of the plain implementation, of every draw or until they suffice. A record is of every
    draw. `score_magnitude`, the largest sum of absolute products that makes a score, is the magnitude of lse.
    """

    def compared(plain):
        by_name = (dict(zip(NAMES, values, strict=True)) for values in (got, truth, plain))
        return compare_results(*by_name, magnitudes={"lse": score_magnitude})

    recorded = os.environ.get("SPARSEFLASH_EXACTNESS")
    found = compared(plain_errors(None if recorded else lambda plain: compared(plain).exact))
    if recorded:
        _record(recorded, label, found.ratios)
    assert found.exact, f"every error must be at most what is allowed; got\n{found}"


def _record(folder, label, ratios):
    """Appends to a file of the folder that experiments.benchmarks.exactness reads."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, f"{os.getpid()}.jsonl"), "a") as file:
        file.write(json.dumps({**label, **ratios}) + "\n")

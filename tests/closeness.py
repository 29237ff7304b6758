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

    `score_magnitude`, the largest sum of absolute products that makes a score, is the magnitude of lse.
    """
    by_name = (dict(zip(NAMES, values, strict=True)) for values in (got, truth, plain_errors))
    found = compare_results(*by_name, magnitudes={"lse": score_magnitude})
    _record(label, found.ratios)
    assert found.exact, f"every error must be at most what is allowed; got\n{found}"


def _record(label, ratios):
    """Appends to a file that experiments.benchmarks.exactness reads, if SPARSEFLASH_EXACTNESS names a folder."""
    folder = os.environ.get("SPARSEFLASH_EXACTNESS")
    if folder:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"{os.getpid()}.jsonl"), "a") as file:
            file.write(json.dumps({**label, **ratios}) + "\n")

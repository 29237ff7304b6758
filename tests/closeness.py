"""How close is close enough: the error of a plain computation in the same dtype, times two, plus about one ulp."""

import json
import math
import os
from typing import NamedTuple

import torch

NAMES = ("out", "lse", "dq", "dk", "dv")


class Results(NamedTuple):
    """What an attention gives: `out`, `lse` and the three gradients."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def largest_error(got, truth):
    """The largest distance of `got` from `truth`; infinite if an infinity is not where the truth has it, or for NaN."""
    truth, got = truth.detach().double(), got.detach().double()
    infinite = truth.isinf()
    if not torch.equal(got[infinite], truth[infinite]) or not got[~infinite].isfinite().all():
        return math.inf
    return (got - truth)[~infinite].abs().max().item() if not infinite.all() else 0.0


def error_in_yardsticks(got, truth, plain_error, magnitude=0.0):
    """The largest error of `got` against `truth`, in units of what is allowed; at most 1 is exact.

    Allowed is twice `plain_error`, the largest error of the same computation done plainly in the same dtype, plus the
    distance to the next number of got's dtype at the largest true value, or at `magnitude` if that is larger: the size
    of the numbers that are summed, where what they sum to is small.
    """
    error = largest_error(got, truth)
    if error == 0.0:
        return 0.0
    finite = truth.detach().double().masked_fill(truth.isinf(), 0.0)
    largest = max(finite.abs().max().item(), magnitude)
    allowed = 2 * plain_error + torch.finfo(got.dtype).eps * largest
    return error / allowed if allowed > 0.0 else math.inf


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
    """Appends to a file of this process if SPARSEFLASH_EXACTNESS names a folder; `experiments.exactness` reads them."""
    folder = os.environ.get("SPARSEFLASH_EXACTNESS")
    if folder:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"{os.getpid()}.jsonl"), "a") as file:
            file.write(json.dumps({**label, **ratios}) + "\n")

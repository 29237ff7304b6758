"""How close is close enough: the error of a plain computation in the same dtype, times two, plus about one ulp."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def largest_error(got: Tensor, truth: Tensor) -> float:
    """The largest distance of `got` from `truth`; infinite if an infinity is not where the truth has it, or for NaN.

    >>> largest_error(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]))
    0.5
    """
    truth, got = truth.detach().double(), got.detach().double()
    infinite = truth.isinf()
    if not torch.equal(got[infinite], truth[infinite]) or not got[~infinite].isfinite().all():
        return math.inf
    return float((got - truth)[~infinite].abs().max()) if not infinite.all() else 0.0


def error_in_yardsticks(got: Tensor, truth: Tensor, plain_error: float, magnitude: float = 0.0) -> float:
    """The largest error of `got` against `truth`, in units of what is allowed; at most 1 is exact.

    Allowed is twice `plain_error`, the largest error of the same computation done plainly in the same dtype, plus the
    distance to the next number of got's dtype at the largest true value, or at `magnitude` if that is larger: the size
    of the numbers that are summed, where what they sum to is small.

    >>> round(error_in_yardsticks(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), plain_error=0.5), 3)
    0.5
    """
    error = largest_error(got, truth)
    if error == 0.0:
        return 0.0
    finite = truth.detach().double().masked_fill(truth.isinf(), 0.0)
    largest = max(float(finite.abs().max()), magnitude)
    allowed = 2 * plain_error + torch.finfo(got.dtype).eps * largest
    return error / allowed if allowed > 0.0 else math.inf

"""How close is close enough: the error of a plain computation in the same dtype, times two, plus about one ulp."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_FEW_QUERIES = 256
_FEW_SCORES = 1 << 22


@dataclass(frozen=True)
class Error:
    """The error of a result, and what is allowed; of all its values together, too, where that was asked for.

    `largest`: the largest distance from the truth; `rms`: the root of their mean square.
    """

    largest: float
    allowed: float
    rms: float = 0.0
    allowed_rms: float = math.inf

    @property
    def ratio(self) -> float:
        """The error in units of what is allowed, the worse of the two: at most 1 is exact."""
        pairs = ((self.largest, self.allowed), (self.rms, self.allowed_rms))
        # No error is within any yardstick. What is not finite is no yardstick: the plain computation has overflowed.
        return max(0.0 if e == 0.0 else e / a if e < math.inf and 0.0 < a < math.inf else math.inf for e, a in pairs)


def error_of(got: Tensor, truth: Tensor, plain: Tensor | float, *, magnitude: float = 0.0, rms: bool = False) -> Error:
    """The error of `got` against `truth`, in fp64, and what is allowed.

    Allowed is twice the error of `plain`, the same computation done plainly in the same dtype, plus the distance to the
    next number of got's dtype at the largest true value, or at `magnitude` if that is larger: the size of the numbers
    that are summed, where what they sum to is small.

    `plain`: the plain result, or its largest error, if that is known from several draws. `rms`: the root-mean-square
    error must keep to the same rule, too, which finds small errors everywhere; for that `plain` must be a result.

    >>> error_of(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]).double(), 0.5).ratio < 0.5
    True
    """
    eps = torch.finfo(got.dtype).eps
    finite = truth.detach().double().masked_fill(truth.isinf(), 0.0)
    largest = max(float(finite.abs().max()) if finite.numel() else 0.0, magnitude)
    plain_error = largest_error(plain, truth) if isinstance(plain, Tensor) else plain
    error = Error(largest_error(got, truth), 2 * plain_error + eps * largest)
    if not rms:
        return error
    if not isinstance(plain, Tensor):
        raise TypeError(f"plain must be the plain result to judge the root-mean-square error; got {plain!r}.")
    size = max(float(finite.square().mean().sqrt()) if finite.numel() else 0.0, magnitude)
    return Error(error.largest, error.allowed, _rms_error(got, truth), 2 * _rms_error(plain, truth) + eps * size)


def largest_error(got: Tensor, truth: Tensor) -> float:
    """The largest distance of `got` from `truth`; infinite if an infinity is not where the truth has it, or for NaN.

    >>> largest_error(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]))
    0.5
    """
    if (apart := _apart(got, truth)) is None:
        return math.inf
    return float(apart.abs().max()) if apart.numel() else 0.0


def draws_for(queries: int, scores: int) -> int:
    """On how many draws of the values the plain error should be measured, for so many queries and scores of all heads.

    One draw of few values would be a yardstick of random length: a plain result is sometimes right to the last bit.
    """
    return 16 if queries < _FEW_QUERIES else 4 if scores <= _FEW_SCORES else 1


def plain_dtype(dtype: torch.dtype) -> tuple[torch.dtype, float]:
    """In which dtype to measure the plain error of results of `dtype`, and what to multiply it by.

    No truth is truer than fp64, so its yardstick is that of fp32, as much shorter as the numbers are longer, and half
    as long again, because the truth errs, too.
    """
    if dtype == torch.float64:
        return torch.float32, 1.5 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return dtype, 1.0


def _rms_error(got: Tensor, truth: Tensor) -> float:
    apart = _apart(got, truth)
    if apart is None:
        return math.inf
    return float(apart.square().mean().sqrt()) if apart.numel() else 0.0


def _apart(got: Tensor, truth: Tensor) -> Tensor | None:
    """The differences where the truth is finite; None where an infinity is not where the truth has it, or for NaN."""
    got, truth = got.detach().double(), truth.detach().double()
    infinite = truth.isinf()
    if not torch.equal(got[infinite], truth[infinite]) or not bool(got[~infinite].isfinite().all()):
        return None
    return (got - truth)[~infinite]

"""The allowed error: twice the error of a plain computation in the same dtype, plus about one ulp."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_FEW_QUERIES = 256
_FEW_SCORES = 1 << 22


@dataclass(frozen=True)
class Error:
    """The error of a result and the allowed error; also for the root mean square, if that was asked for.

    >>> Error(largest=1e-3, allowed=2e-3).ratio
    0.5

    `largest`: the largest difference from the truth; `rms`: the root mean square of all differences.
    """

    largest: float
    allowed: float
    rms: float = 0.0
    allowed_rms: float = math.inf

    @property
    def ratio(self) -> float:
        """The error relative to the allowed error, the worse of the two kinds: at most 1 is exact."""
        pairs = ((self.largest, self.allowed), (self.rms, self.allowed_rms))
        # An error of 0 is always allowed. A limit that is not finite allows nothing: the plain computation has
        # overflowed.
        return max(0.0 if e == 0.0 else e / a if e < math.inf and 0.0 < a < math.inf else math.inf for e, a in pairs)


def error_of(got: Tensor, truth: Tensor, plain: Tensor | float, *, magnitude: float = 0.0, rms: bool = False) -> Error:
    """The error of `got` against `truth` (in fp64), and the allowed error.

    >>> error_of(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]).double(), 0.5).ratio < 0.5
    True

    The allowed error is twice the error of `plain`, the same computation done plainly in the same dtype, plus the
    spacing of got's dtype at the largest true value, or at `magnitude` if larger: the size of the summands of a result
    that is a small sum of large numbers.

    Args:
        got, truth: the result, and the true result in fp64.
        plain: the plain result, or its largest error if that is known from several draws.
        rms: also apply the rule to the root-mean-square error, which detects small errors in many values; `plain` must
            then be a result.
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
    """The largest difference of `got` from `truth`; infinite if `got` has a NaN, or an infinity that `truth` has not.

    >>> largest_error(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]))
    0.5
    """
    if (apart := _apart(got, truth)) is None:
        return math.inf
    return float(apart.abs().max()) if apart.numel() else 0.0


def draws_for(queries: int, scores: int, *, learned: bool = False) -> int:
    """The number of draws of the values for measuring the plain error, which varies a lot where values are few.

    >>> draws_for(queries=100, scores=10_000), draws_for(queries=4096, scores=1 << 24)
    (16, 1)

    Args:
        queries: queries of all heads that see a key (`live_queries`).
        scores: the scores of these queries.
        learned: whether gradients of tensors of score modifications are judged, too, which may be one number a head.
    """
    if learned:
        return 24
    return 16 if queries < _FEW_QUERIES else 4 if scores <= _FEW_SCORES else 1


def live_queries(out: Tensor) -> int:
    """The number of queries that see a key, from the true `out [..., Nq, Dv]`: all others have zeros.

    >>> live_queries(torch.tensor([[0.5, 0.0], [0.0, 0.0], [1.0, 2.0]]))
    2
    """
    return int(out.any(-1).sum())


def plain_dtype(dtype: torch.dtype) -> tuple[torch.dtype, float]:
    """The dtype in which to measure the plain error of results of `dtype`, and the factor to multiply it by: fp64 is
    measured in fp32, and scaled by the ratio of the machine epsilons, times 1.5 for the truth's own error.

    >>> plain_dtype(torch.bfloat16)
    (torch.bfloat16, 1.0)
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
    """The differences where the truth is finite; None if `got` has a NaN, or other infinities than the truth."""
    got, truth = got.detach().double(), truth.detach().double()
    infinite = truth.isinf()
    if bool(infinite.any()):
        if not torch.equal(got[infinite], truth[infinite]):
            return None
        got, truth = got[~infinite], truth[~infinite]
    return got - truth if bool(got.isfinite().all()) else None

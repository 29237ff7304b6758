from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Results = Tensor | tuple[Tensor, ...]

# A peer computes the same function if it differs from ours by less (Frobenius norms): more than rounding, less than a
# wrong mask or scale.
SAME_FUNCTION = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 3e-3, torch.float64: 1e-6}
_LONGEST_REASON = 200


class Unavailable(Exception):
    """Raised by a peer that cannot serve a case, with the reason."""


@dataclass(frozen=True)
class Way:
    """A call to time. The settings `flops` and `bytes`, per call, are printed as rates.

    like: a way of the same case whose results must agree. recorded: on a GPU, time a CUDA graph. peer: a failure is
    recorded, not raised.
    """

    call: Callable[[], Any]
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    settings: Mapping[str, Any] = field(default_factory=dict)
    like: str | None = None
    recorded: bool = False
    peer: bool = False


def passes(
    run: Callable[[], Tensor], wanted: Sequence[Tensor], dout: Tensor
) -> dict[str, Callable[[], Tensor | tuple[Tensor, ...]]]:
    """A forward without gradients, and a forward and the backward to `wanted`."""
    return {"forward": torch.no_grad()(run), "both": lambda: torch.autograd.grad(run(), wanted, dout)}


def difference(result: Tensor, ours: Tensor) -> float:
    apart, size = 0.0, 0.0
    for one, other in zip(result, ours):  # fp32 copies of all would double the memory
        apart += float((one.float() - other.float()).norm()) ** 2
        size += float(other.float().norm()) ** 2
    return math.sqrt(apart / size)


def failure_of(peer: Callable[[], Results], ours: Callable[[], Results]) -> Exception | None:
    try:
        results, expected = peer(), ours()
    except Exception as failure:
        return failure
    if isinstance(results, Tensor):
        results, expected = (results,), (expected,)
    for result, other in zip(results, expected, strict=True):
        apart = difference(result, other)
        if not apart <= SAME_FUNCTION[result.dtype]:
            return ValueError(f"differs from ours by {apart:.2g}, relative")
    return None


def without_frames(failure: Exception) -> Exception:
    """The error, and the errors that led to it, without tracebacks.

    Their frames would keep the autograd graph of the failed call alive. Its nodes belong to the stream of that call, so
    no later backward of the same tensors could be recorded.
    """
    left: list[BaseException | None] = [failure]
    while left:
        each = left.pop()
        if each is not None and each.__traceback__ is not None:
            each.__traceback__ = None
            left += each.__cause__, each.__context__
    return failure


def reason(failure: Exception) -> str:
    if isinstance(failure, Unavailable):
        return f"skipped: {failure}"
    if isinstance(failure, torch.OutOfMemoryError):
        return "out of memory"
    first = next((line.strip() for line in str(failure).splitlines() if line.strip()), "")
    first = re.sub(r"(?<!\w)(?:/[\w.+-]+)+/", "", first)  # local folders
    return f"{type(failure).__name__}: {first}"[:_LONGEST_REASON]

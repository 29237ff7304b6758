"""The interface between a peer and the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from experiments.speed.cases import Case
from experiments.speed.patterns import Pattern


class Unavailable(Exception):
    """The peer does not serve this case, and says why."""


@dataclass(frozen=True)
class Inputs:
    """Leaves q, k, v that require grad, and the output's gradient: [B, H, N, D] or a peer's own order."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def as_given(tensor: Tensor) -> Tensor:
    """The tensor itself: the peer's order is [B, H, N, D]."""
    return tensor


@dataclass(frozen=True)
class Runner:
    """One implementation, ready to be called on inputs in its own order.

    `call(q, k, v)` returns the output. `context()` is entered around whole loops of calls, so what it costs
    is not timed. `to_bhnd` brings an output or a gradient to [B, H, N, D], for comparing only.
    """

    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    inputs: Inputs
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    to_bhnd: Callable[[Tensor], Tensor] = as_given

    def forward(self) -> Tensor:
        """A call whose output can be differentiated."""
        return self.call(self.inputs.q, self.inputs.k, self.inputs.v)

    def inference(self) -> Callable[[], Tensor]:
        """A call on inputs that require no grad."""
        return partial(self.call, *(tensor.detach() for tensor in (self.inputs.q, self.inputs.k, self.inputs.v)))


Peer = Callable[[Case, Pattern, Inputs], Runner]

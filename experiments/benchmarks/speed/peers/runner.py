from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from experiments.benchmarks.harness import Unavailable
from experiments.benchmarks.speed.cases import Case
from experiments.benchmarks.speed.patterns import Pattern


@dataclass(frozen=True)
class Inputs:
    """q, k and v, leaves that require grad, and the output's gradient, as [B, H, N, D] or in a peer's own order."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.dout


def as_given(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Runner:
    """An implementation, ready to be called on inputs in its own order. `context()` is entered around loops of calls;
    `to_bhnd` converts outputs and gradients for comparison."""

    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    inputs: Inputs
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    to_bhnd: Callable[[Tensor], Tensor] = as_given

    def forward(self) -> Tensor:
        return self.call(self.inputs.q, self.inputs.k, self.inputs.v)

    def gradients(self, out: Tensor, *, retain_graph: bool = False) -> tuple[Tensor, ...]:
        leaves = self.inputs.q, self.inputs.k, self.inputs.v
        return torch.autograd.grad(out, leaves, self.inputs.dout, retain_graph=retain_graph)

    def step(self) -> tuple[Tensor, ...]:
        out = self.forward()
        return out.detach(), *self.gradients(out)

    def inference(self) -> Callable[[], Tensor]:
        return partial(self.call, *(tensor.detach() for tensor in (self.inputs.q, self.inputs.k, self.inputs.v)))


def packed(call: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs) -> Runner:
    """A call on the tokens of one batch element, [tokens, heads, dim]."""
    q, k, v, dout = (x.detach()[0].transpose(0, 1).contiguous() for x in inputs.tensors)
    own = Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)
    return Runner(call, own, to_bhnd=lambda x: x.transpose(0, 1)[None])


def require_half_on_gpu(case: Case, inputs: Inputs) -> None:
    if inputs.q.device.type != "cuda":
        raise Unavailable("needs a CUDA device")
    if case.dtype not in (torch.float16, torch.bfloat16):
        raise Unavailable("fp16 and bf16 only")


def planned(plan: Callable[[], Callable[[], Tensor]]) -> Callable[[], Tensor]:
    once = cache(plan)
    return lambda: once()()


Peer = Callable[[Case, Pattern, Inputs], Runner]

"""The calls of a case: forward, and forward with backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.benchmarks.io.cases import DENSE, STANDARD, Case
from experiments.training.layers.attention import ElementMask, standard_attention
from sparseflash import attention


@dataclass(frozen=True)
class Calls:
    """`forward()` returns out; `both()` returns out and the gradients of q, k and v."""

    forward: Callable[[], Tensor]
    both: Callable[[], tuple[Tensor, ...]]


def calls_of(case: Case, device: torch.device, seed: int = 0) -> Calls:
    """The case on random inputs, which are the same for all cases of one shape."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (case.batch, case.heads, case.length, case.head_dim)
    q, k, v, dout = (torch.randn(shape, generator=generator, device=device).to(case.dtype) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    mask = case.mask().to(device) if case.kind not in (STANDARD, DENSE) else None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if case.kind == STANDARD:
            return standard_attention(q, k, v, ElementMask(None))
        return attention(q, k, v, mask)

    def forward() -> Tensor:
        with torch.no_grad():
            return run(*inputs)

    def both() -> tuple[Tensor, ...]:
        out = run(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, dout)

    return Calls(forward, both)

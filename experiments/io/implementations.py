"""A case as calls: forward, and forward with backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.io.cases import DENSE, STANDARD, Case
from sparseflash import attention


@dataclass(frozen=True)
class Calls:
    """`forward()` returns out; `both()` returns out and the gradients of q, k and v."""

    forward: Callable[[], Tensor]
    both: Callable[[], tuple[Tensor, ...]]


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention that writes its scores to memory: two products and a softmax between them."""
    return torch.softmax((q * q.shape[-1] ** -0.5) @ k.mT, -1) @ v


def calls_of(case: Case, device: torch.device, seed: int = 0) -> Calls:
    """The case on random inputs; the same for every case of one shape."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (case.batch, case.heads, case.length, case.head_dim)
    q, k, v, dout = (torch.randn(shape, generator=generator, device=device).to(case.dtype) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    if case.kind == STANDARD:
        run = standard
    else:
        mask = None if case.kind == DENSE else case.mask().to(device)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, mask)

    def forward() -> Tensor:
        with torch.no_grad():
            return run(*inputs)

    def both() -> tuple[Tensor, ...]:
        out = run(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, dout)

    return Calls(forward, both)

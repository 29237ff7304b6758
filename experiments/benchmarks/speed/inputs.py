"""How a case is run, and the tensors that it is run with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from experiments.benchmarks.speed.cases import Case
from experiments.benchmarks.speed.peers.runner import Inputs


@dataclass(frozen=True)
class Options:
    """How a case is run: for each implementation, `rounds` series of `round_ms` milliseconds or of `calls` single
    calls.

    `heads` heads of k and v, and the query heads that read them, are checked.
    """

    device: torch.device
    rounds: int = 3
    round_ms: float = 60.0
    calls: int = 300
    heads: int = 3
    seed: int = 0


def make_inputs(case: Case, options: Options) -> Inputs:
    """Normal random q and output gradient [B, H, N, D], k and v [B, heads of keys, N, D]."""
    generator = torch.Generator(options.device).manual_seed(options.seed)
    q, k, v, dout = (
        torch.randn(
            (case.batch, heads, case.length, case.head_dim),
            generator=generator, device=options.device, dtype=case.dtype,
        )
        for heads in (case.heads, case.heads_of_keys, case.heads_of_keys, case.heads)
    )  # fmt: skip
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)

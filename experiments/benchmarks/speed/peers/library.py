from __future__ import annotations

import torch

from experiments.benchmarks.harness import Unavailable
from experiments.benchmarks.speed.cases import ON_REQUEST, Case
from experiments.benchmarks.speed.patterns import Pattern, lengths_of
from experiments.benchmarks.speed.peers.runner import Inputs, Runner, packed
from sparseflash import attention, masks
from sparseflash.attention import Backend
from sparseflash.varlen import attention_varlen

REFERENCE_LIMIT = 4096  # tokens


def ours(case: Case, pattern: Pattern, inputs: Inputs, backend: Backend | None = None) -> Runner:
    """`attention` with the mask of the case; dense workloads have none, as in models."""
    mask = None if case.kind == "dense" and case.group == ON_REQUEST else pattern.mask
    return Runner(lambda q, k, v: attention(q, k, v, mask, backend=backend), inputs)


def varlen(case: Case, pattern: Pattern, inputs: Inputs) -> Runner:
    if case.kind != "documents":
        raise Unavailable("documents only")
    ends = torch.tensor([0, *lengths_of(case)]).cumsum(0)
    return packed(lambda q, k, v: attention_varlen(q, k, v, ends, pattern=masks.causal), inputs)


def reference(case: Case, pattern: Pattern, inputs: Inputs) -> Runner:
    if case.length > REFERENCE_LIMIT:
        raise Unavailable(f"dense, so for at most {REFERENCE_LIMIT} tokens")
    return ours(case, pattern, inputs, backend="reference")

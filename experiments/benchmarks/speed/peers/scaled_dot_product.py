from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from experiments.benchmarks.harness import Unavailable
from experiments.benchmarks.speed.cases import Case
from experiments.benchmarks.speed.patterns import Pattern
from experiments.benchmarks.speed.peers.runner import Inputs, Runner


def with_backend(case: Case, pattern: Pattern, inputs: Inputs, backend: SDPBackend | None = None) -> Runner:
    if case.kind not in ("dense", "causal"):
        raise Unavailable("dense and causal masks only")
    if backend is not None and inputs.q.device.type != "cuda":
        raise Unavailable("needs a CUDA device")
    if backend is not None and case.dtype == torch.float32:
        raise Unavailable("no fp32")
    causal, grouped = case.kind == "causal", case.heads_of_keys < case.heads
    call = lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)  # noqa: E731
    if backend is None:
        return Runner(call, inputs)
    return Runner(call, inputs, context=lambda: sdpa_kernel(backend))


def sdpa(case: Case, pattern: Pattern, inputs: Inputs) -> Runner:
    """On a GPU only for fp32, because FA2 and cuDNN have rows of their own."""
    if inputs.q.device.type == "cuda" and case.dtype != torch.float32:
        raise Unavailable("fp32 only; FA2 and cuDNN are timed by name")
    return with_backend(case, pattern, inputs)

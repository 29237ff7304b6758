"""sparseflash itself: the default kernels for the device, kernels by name, and the dense reference."""

from __future__ import annotations

from functools import partial

from experiments.benchmarks.harness import Unavailable
from experiments.benchmarks.speed.cases import Case
from experiments.benchmarks.speed.patterns import Pattern, block_mask
from experiments.benchmarks.speed.peers.runner import Inputs, Runner
from sparseflash import attention
from sparseflash.attention import Backend

# The reference holds several N x N matrices for each head.
REFERENCE_LIMIT = 4096  # tokens


def ours(case: Case, pattern: Pattern, inputs: Inputs, backend: Backend | None = None) -> Runner:
    """`attention` with the mask of the case, or `mask=None` if single dense calls are timed."""
    call = partial(attention, backend=backend)
    if case.kind == "dense" and "call" in case.passes:
        return Runner(call, inputs)
    mask = block_mask(case.kind, case.length, case.block)
    if abs(mask.density - pattern.density) > 0.5 / case.length**2:
        raise ValueError(f"the mask must keep {pattern.kept} scores; got a density of {mask.density:.6%}.")
    mask = mask.to(inputs.q.device)
    return Runner(lambda q, k, v: call(q, k, v, mask), inputs)


def reference(case: Case, pattern: Pattern, inputs: Inputs) -> Runner:
    """The library's dense reference in plain PyTorch, for short lengths."""
    if case.length > REFERENCE_LIMIT:
        raise Unavailable(f"dense, so for at most {REFERENCE_LIMIT} tokens")
    mask = block_mask(case.kind, case.length, case.block).to(inputs.q.device)
    return Runner(lambda q, k, v: attention(q, k, v, mask, backend="reference"), inputs)

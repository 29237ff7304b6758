"""FlexAttention, compiled, with its BlockMask converted from ours.

`create_block_mask` would evaluate N x N scores and produce the same lists.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import flex_attention, noop_mask

from experiments.benchmarks.harness import Unavailable
from experiments.benchmarks.speed.cases import Case
from experiments.benchmarks.speed.patterns import Pattern
from experiments.benchmarks.speed.peers.runner import Inputs, Runner
from sparseflash.interop import to_flex


def flex_mask(pattern: Pattern) -> FlexMask:
    return to_flex(pattern.mask, mask_mod=pattern.rule or noop_mask)


@cache
def compiled(mode: str | None) -> Callable[..., Tensor]:
    import torch._dynamo
    import torch._functorch.config

    # Every shape and every mask_mod has its own graph; past the default limits nothing would be compiled.
    torch._dynamo.config.recompile_limit = 2048
    torch._dynamo.config.accumulated_recompile_limit = 2048
    # Retained graphs do not work with donated buffers.
    torch._functorch.config.donated_buffer = False
    # fullgraph: an error, instead of N x N scores in eager mode.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True, mode=mode)


def arguments(case: Case, pattern: Pattern) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if case.kind != "dense":
        options["block_mask"] = flex_mask(pattern)
    if case.heads_of_keys < case.heads:
        options["enable_gqa"] = True
    if case.block < 128:
        options["kernel_options"] = small_tiles(case.block)
    return options


def small_tiles(block: int) -> dict[str, int]:
    """`kernel_options` for blocks of fewer than 128 tokens. The backward takes none (PyTorch 2.11) and raises an error
    if its choice does not fit."""
    tile = {"BLOCK_M": block, "BLOCK_N": block, "num_warps": 4}
    return {f"fwd_{name}": value for name, value in tile.items()}


def flex(case: Case, pattern: Pattern, inputs: Inputs, mode: str | None = None) -> Runner:
    """mode: of torch.compile; by default forward tiles are cut to small mask blocks, and nothing is tuned."""
    if inputs.q.device.type != "cuda":
        raise Unavailable("needs a CUDA device")
    call, options = compiled(mode), arguments(case, pattern)
    return Runner(lambda q, k, v: call(q, k, v, **options), inputs)

"""FlexAttention, compiled, with its BlockMask built straight from block lists.

`create_block_mask` evaluates N x N scores (gigabytes at these lengths, or minutes of compilation) and gives
the same lists. Masks of the same shape whose blocks are all full share one compiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import flex_attention

from experiments.benchmarks.speed.cases import Case
from experiments.benchmarks.speed.patterns import Pattern, Rule
from experiments.benchmarks.speed.peers.runner import Inputs, Runner, Unavailable


def block_lists(layout: Tensor) -> tuple[Tensor, Tensor]:
    """Counts int32 [1, 1, M] and padded column indices int32 [1, 1, M, M] of a bool layout [M, M].

    The live columns of a row come first, in order; FlexAttention never reads the others.
    """
    counts = layout.sum(-1, dtype=torch.int32)
    columns = torch.argsort(layout.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], columns.contiguous()[None, None]


def mask_mod(rule: Rule) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The element rule with FlexAttention's arguments."""
    return lambda b, h, q_idx, k_idx: rule(q_idx, k_idx)


def flex_mask(pattern: Pattern) -> FlexMask:
    """FlexAttention's mask of `pattern`, on its device: full and partial blocks apart."""
    return FlexMask.from_kv_blocks(
        *block_lists(pattern.partial),
        *block_lists(pattern.full),
        BLOCK_SIZE=pattern.block,
        mask_mod=None if pattern.rule is None else mask_mod(pattern.rule),
        seq_lengths=(pattern.length, pattern.length),
    )


@cache
def _compiled(mode: str | None) -> Callable[..., Tensor]:
    import torch._dynamo
    import torch._functorch.config

    # Every shape and every mask_mod is a graph of its own, some hundreds in a whole run; past the limits (8 of one
    # function, 256 in all) nothing would be compiled.
    torch._dynamo.config.recompile_limit = 2048
    torch._dynamo.config.accumulated_recompile_limit = 2048
    # The backward is timed on a retained graph, which donated buffers forbid.
    torch._functorch.config.donated_buffer = False
    # fullgraph: what cannot be compiled raises, instead of running N x N in eager mode.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True, mode=mode)


def arguments(case: Case, pattern: Pattern) -> dict[str, Any]:
    """The arguments of `flex_attention` that say the mask and the grouping of the heads."""
    options: dict[str, Any] = {}
    if case.kind != "dense":
        options["block_mask"] = flex_mask(pattern)
    if case.heads_of_keys < case.heads:
        options["enable_gqa"] = True
    if case.block < 128:
        # The tiles that it picks by itself do not fit a smaller mask block, and it raises. The forward's can be cut to
        # the block; of the backward's it looks at its own pick (PyTorch 2.11), and raises if that does not fit.
        tile = {"BLOCK_M": case.block, "BLOCK_N": case.block, "num_warps": 4}
        options["kernel_options"] = {f"fwd_{name}": value for name, value in tile.items()}
    return options


def _runner(case: Case, pattern: Pattern, inputs: Inputs, mode: str | None) -> Runner:
    if inputs.q.device.type != "cuda":
        raise Unavailable("needs a CUDA device")
    call, options = _compiled(mode), arguments(case, pattern)
    return Runner(lambda q, k, v: call(q, k, v, **options), inputs)


def flex(case: Case, pattern: Pattern, inputs: Inputs) -> Runner:
    """FlexAttention with the configuration that PyTorch picks by default; forward tiles cut to small mask blocks."""
    return _runner(case, pattern, inputs, None)


def flex_autotune(case: Case, pattern: Pattern, inputs: Inputs) -> Runner:
    """FlexAttention tuned by torch.compile: more than a minute of compilation a shape."""
    if not case.tuned:
        raise Unavailable("tuning takes over a minute a shape: see the group tuned, or give --flex-autotune")
    return _runner(case, pattern, inputs, "max-autotune-no-cudagraphs")

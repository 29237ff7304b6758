"""cuDNN's block-sparse attention (`nvidia-cudnn-frontend`, in the CuTe DSL): full tiles, in blocks of 64 or 128.

Written for 1.32.0, whose backward takes D = 128 alone on Hopper. Lists are `[B, H, M, longest row]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.benchmarks.harness import Unavailable
from experiments.benchmarks.speed.cases import Case
from experiments.benchmarks.speed.patterns import Pattern
from experiments.benchmarks.speed.peers.flexattention import flex_mask
from experiments.benchmarks.speed.peers.runner import Inputs, Runner, require_half_on_gpu

BLOCKS = (64, 128)


class Package(NamedTuple):
    forward: Callable[..., Any]
    backward: Callable[..., Any]


def load() -> Package:
    try:
        from cudnn.block_sparse_attention import block_sparse_attention_backward, block_sparse_attention_forward
    except ImportError as failure:
        raise Unavailable(f"cuDNN's block-sparse attention is not installed: {failure}") from failure
    return Package(block_sparse_attention_forward, block_sparse_attention_backward)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, package: Package, options: dict[str, Any]) -> Tensor:
        found = package.forward(q, k, v, **options)
        out: Tensor = found["o_tensor"]
        ctx.save_for_backward(q, k, v, out, found["lse_tensor"])
        ctx.package, ctx.options = package, options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.package.backward(dout, *ctx.saved_tensors, **ctx.options)
        return found["dq_tensor"], found["dk_tensor"], found["dv_tensor"], None, None


def arguments(case: Case, pattern: Pattern) -> dict[str, Any]:
    flex = flex_mask(pattern)
    if bool(flex.kv_num_blocks.any()):
        raise Unavailable("full tiles only")
    if case.block not in BLOCKS:
        raise Unavailable(f"blocks of {' or '.join(map(str, BLOCKS))} only")
    counts = flex.full_kv_num_blocks
    rows = case.batch, case.heads, counts.shape[-1]
    return {
        "q2k_block_index": flex.full_kv_indices[..., : int(counts.max())].expand(*rows, -1).contiguous(),
        "q2k_block_nums": counts.expand(rows).contiguous(),
        "sparse_block_size": case.block,
        "layout": "bhsd",
    }


def cudnn_sparse(case: Case, pattern: Pattern, inputs: Inputs) -> Runner:
    require_half_on_gpu(case, inputs)
    return runner(case, pattern, inputs, load())


def runner(case: Case, pattern: Pattern, inputs: Inputs, package: Package) -> Runner:
    options = arguments(case, pattern)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = _Attention.apply(q, k, v, package, options)  # type: ignore[no-untyped-call]
        return found

    return Runner(call, inputs)

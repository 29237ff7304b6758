"""FlashAttention-4 (`flash-attn-4`, the CuTe DSL): its own arguments for dense, causal and window masks, its packed
sequences for documents, block-sparse lists of `sparseflash.interop.fa4` for all others. Inputs have its layout, [B,
N, H, D], from the start, so no copy is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.benchmarks.harness import Unavailable
from experiments.benchmarks.speed.cases import Case
from experiments.benchmarks.speed.patterns import READS_MEMORY, Pattern, Rule, lengths_of, window_of
from experiments.benchmarks.speed.peers.flexattention import flex_mask
from experiments.benchmarks.speed.peers.runner import Inputs, Runner, packed, require_half_on_gpu
from sparseflash import BlockMask
from sparseflash.interop.fa4 import BlockSparseTensors, to_fa4


class Package(NamedTuple):
    attention: Callable[..., tuple[Tensor, Tensor | None]]
    tensors: Callable[..., Any]  # BlockSparseTensorsTorch
    cute: Any  # cutlass.cute


def load() -> Package:
    try:
        from cutlass import cute
        from flash_attn.cute import flash_attn_func
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    except ImportError as failure:
        raise Unavailable(f"flash-attn-4 is not installed: {failure}") from failure
    return Package(flash_attn_func, BlockSparseTensorsTorch, cute)


def call(**options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A call on `[B, H, N, D]`, whose tensors it reads through views."""
    attention = load().attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(*(x.transpose(1, 2) for x in (q, k, v)), **options)[0].transpose(1, 2)

    return attend


def mask_mod(rule: Rule, package: Package) -> Callable[..., Any]:
    @package.cute.jit  # type: ignore[untyped-decorator]
    def live(batch: Any, head: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        return rule(batch, head, q_idx, kv_idx)

    return live


def small_blocks(pattern: Pattern) -> tuple[BlockSparseTensors, BlockSparseTensors]:
    """Blocks that `to_fa4` refuses because FA4 does not train with them. 4.0.0b36 has a forward for blocks of 64 on
    Hopper."""
    flex, size = flex_mask(pattern), pattern.mask.block_q
    rows = flex.kv_num_blocks, flex.kv_indices, flex.full_kv_num_blocks, flex.full_kv_indices
    columns = flex.q_num_blocks, flex.q_indices, flex.full_q_num_blocks, flex.full_q_indices
    forward, backward = (
        BlockSparseTensors(partly, _cut(listed, partly), full, _cut(whole, full), (size, size))
        for partly, listed, full, whole in (rows, columns)
    )
    return forward, backward


def _cut(indices: Tensor, counts: Tensor) -> Tensor:
    return indices[..., : max(1, int(counts.max()))].contiguous()


def arguments(case: Case, pattern: Pattern, package: Package) -> dict[str, Any]:
    if case.kind in READS_MEMORY:
        raise Unavailable("its rules read no memory")
    if case.kind == "dense":
        return {}
    if case.kind == "causal":
        return {"causal": True}
    if (window := window_of(case)) is not None:
        return {"window_size": window}
    if case.block == 128:
        return of_mask(pattern.mask, pattern.rule, package)
    return _of_lists(*small_blocks(pattern), pattern.rule, package)


def of_mask(mask: BlockMask, rule: Rule | None, package: Package) -> dict[str, Any]:
    forward, backward, _ = to_fa4(mask, partial=rule is not None)
    return _of_lists(forward, backward, rule, package)


def _of_lists(
    forward: BlockSparseTensors, backward: BlockSparseTensors, rule: Rule | None, package: Package
) -> dict[str, Any]:  # fmt: skip
    given = {
        "block_sparse_tensors": package.tensors(**forward._asdict()),
        "block_sparse_tensors_bwd": package.tensors(**backward._asdict()),
    }
    return given if rule is None else given | {"mask_mod": mask_mod(rule, package)}


def fa4(case: Case, pattern: Pattern, inputs: Inputs) -> Runner:
    return _runner(case, pattern, inputs)


def fa4_deterministic(case: Case, pattern: Pattern, inputs: Inputs) -> Runner:
    """With deterministic gradients, as ours. In this mode 4.0.0b36 has no block-sparse lists on Hopper."""
    if case.kind not in ("dense", "causal") and window_of(case) is None:
        raise Unavailable("its deterministic backward has dense, causal and window masks only")
    return _runner(case, pattern, inputs, deterministic=True)


def _runner(case: Case, pattern: Pattern, inputs: Inputs, **given: Any) -> Runner:
    require_half_on_gpu(case, inputs)
    package = load()
    if case.kind == "documents":
        from flash_attn.cute import flash_attn_varlen_func

        options = {**given, **sequences(lengths_of(case), inputs.q.device), "causal": True}
        return packed(lambda q, k, v: flash_attn_varlen_func(q, k, v, **options)[0], inputs)
    options = given | arguments(case, pattern, package)
    q, k, v, dout = (tensor.detach().transpose(1, 2).contiguous() for tensor in inputs.tensors)
    return Runner(
        lambda q, k, v: package.attention(q, k, v, **options)[0],
        Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout),
        to_bhnd=lambda tensor: tensor.transpose(1, 2),
    )


def sequences(lengths: list[int], device: torch.device) -> dict[str, Tensor]:
    ends = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    return {"cu_seqlens_q": ends, "cu_seqlens_k": ends}

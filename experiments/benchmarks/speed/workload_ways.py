"""The ways of computing a workload.

Peers get what their authors would give them: FlashAttention-4 its own arguments for causal masks and windows, packed
sequences for documents, and lists for other masks; FlexAttention rules that read no memory, where possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from experiments.benchmarks.harness import Unavailable
from experiments.benchmarks.speed.cases import BACKWARD, FORWARD
from experiments.benchmarks.speed.peers import flashattention4
from experiments.benchmarks.speed.peers.flexattention import compiled
from experiments.benchmarks.speed.peers.runner import Inputs, Runner
from experiments.benchmarks.speed.run import OURS, Subject
from experiments.benchmarks.speed.workloads import KINDS, READS_MEMORY, WORKLOADS, Rule, Workload
from experiments.measurements import Measurement
from sparseflash import BlockMask, attention, interop, masks
from sparseflash.varlen import attention_varlen

PEERS = ("flex", "fa4", "sdpa-cudnn", "sdpa-fa2", "flex-autotune")


def select(globs: str) -> list[Workload]:
    """The workloads whose names match one of the comma-separated globs; raises ValueError if none match."""
    found = [each for each in WORKLOADS if any(fnmatch(each.name, glob.strip()) for glob in globs.split(","))]
    if not found:
        names = ", ".join(each.name for each in WORKLOADS)
        raise ValueError(f"--cases must match at least one of {names}; got {globs!r}.")
    return found


def inputs_of(w: Workload, device: torch.device, seed: int) -> Inputs:
    """Normal random tensors; in bf16, on a CPU in fp32."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kv_heads, v_dim = w.kv_heads or w.heads, w.v_dim or w.dim
    shapes = (w.heads, w.queries, w.dim), (kv_heads, w.k_len, w.dim), (kv_heads, w.k_len, v_dim)
    *leaves, dout = (
        torch.randn(w.batch, *shape, generator=generator, device=device, dtype=dtype)
        for shape in (*shapes, (w.heads, w.queries, v_dim))
    )
    q, k, v = (leaf.requires_grad_() for leaf in leaves)
    return Inputs(q, k, v, dout)


def _packed(call: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs) -> Runner:
    """A call on tensors [tokens, heads, dim]."""
    q, k, v, dout = (x.detach()[0].transpose(0, 1).contiguous() for x in inputs.tensors)
    packed = Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)
    return Runner(call, packed, to_bhnd=lambda x: x.transpose(0, 1)[None])


def _flex(w: Workload, mask: BlockMask | None, rule: Rule | None, inputs: Inputs, mode: str | None) -> Runner:
    if inputs.q.device.type != "cuda" and mode is not None:
        raise Unavailable("needs a CUDA device")
    call = compiled(mode) if inputs.q.device.type == "cuda" else flex_attention
    block_mask = None if mask is None else interop.to_flex(mask, mask_mod=rule)
    grouped = w.kv_heads is not None and w.kv_heads < w.heads
    return Runner(lambda q, k, v: call(q, k, v, block_mask=block_mask, enable_gqa=grouped), inputs)


def fa4_options(
    w: Workload, mask: BlockMask | None, rule: Rule | None, package: flashattention4.Package
) -> dict[str, Any]:
    """The arguments of FlashAttention-4's `flash_attn_func` for the mask."""
    if w.kind in READS_MEMORY:
        raise Unavailable("its rules read no memory")
    if w.kind in ("dense", "causal"):
        return {"causal": w.kind == "causal"}
    if w.kind == "window":
        return {"window_size": (w.sizes[0] - 1, 0)}
    assert mask is not None and rule is not None
    return flashattention4.of_mask(mask, lambda q, k: rule(None, None, q, k), package)


def _fa4(w: Workload, mask: BlockMask | None, rule: Rule | None, inputs: Inputs) -> Runner:
    if inputs.q.device.type != "cuda":
        raise Unavailable("needs a CUDA device")
    package = flashattention4.load()
    if w.kind == "documents":
        from flash_attn.cute import flash_attn_varlen_func

        ends = torch.tensor([0, *w.lengths(w.queries)], device=inputs.q.device).cumsum(0, dtype=torch.int32)
        given = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": True}
        return _packed(lambda q, k, v: flash_attn_varlen_func(q, k, v, **given)[0], inputs)
    options = fa4_options(w, mask, rule, package)
    q, k, v, dout = (x.detach().transpose(1, 2).contiguous() for x in inputs.tensors)
    return Runner(
        lambda q, k, v: package.attention(q, k, v, **options)[0],
        Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout),
        to_bhnd=lambda x: x.transpose(1, 2),
    )


def _sdpa(w: Workload, inputs: Inputs, backend: SDPBackend) -> Runner:
    if w.kind not in ("dense", "causal"):
        raise Unavailable("dense and causal masks only")
    if inputs.q.device.type != "cuda":
        backend = SDPBackend.MATH
    grouped = w.kv_heads is not None and w.kv_heads < w.heads
    call = partial(scaled_dot_product_attention, is_causal=w.kind == "causal", enable_gqa=grouped)
    return Runner(lambda q, k, v: call(q, k, v), inputs, context=lambda: sdpa_kernel(backend))


def makers(
    w: Workload, mask: BlockMask | None, rule: Rule | None, inputs: Inputs, peers: Sequence[str]
) -> Iterator[tuple[str, Callable[[], Runner]]]:
    """By name: the function that makes each implementation, ours first."""
    yield OURS, lambda: Runner(lambda q, k, v: attention(q, k, v, mask), inputs)
    if w.kind == "documents":
        ends = torch.tensor([0, *w.lengths(w.queries)]).cumsum(0)
        yield (
            f"{OURS}-varlen",
            lambda: _packed(lambda q, k, v: attention_varlen(q, k, v, ends, pattern=masks.causal), inputs),
        )
    known: dict[str, Callable[[], Runner]] = {
        "flex": partial(_flex, w, mask, rule, inputs, None),
        "flex-autotune": partial(_flex, w, mask, rule, inputs, "max-autotune-no-cudagraphs"),
        "fa4": partial(_fa4, w, mask, rule, inputs),
        "sdpa-cudnn": partial(_sdpa, w, inputs, SDPBackend.CUDNN_ATTENTION),
        "sdpa-fa2": partial(_sdpa, w, inputs, SDPBackend.FLASH_ATTENTION),
    }
    yield from ((name, known[name]) for name in peers)


def subject_of(w: Workload, peers: Sequence[str], device: torch.device, seed: int) -> Subject:
    """A workload with these peers."""
    mask, rule = KINDS[w.kind](w, device)
    mask = None if mask is None else mask.to(device)
    inputs = inputs_of(w, device, seed)
    live = w.queries * w.k_len * (1.0 if mask is None else mask.density)
    products = live * w.batch * w.heads * (w.dim + (w.v_dim or w.dim)) / 2
    flops = {FORWARD: 4.0 * products, BACKWARD: 10.0 * products}  # two and five products of live scores
    return Subject(
        w.name, mask, inputs, dict(makers(w, mask, rule, inputs, peers)),
        [which for which in flops if which == FORWARD or w.backward], w.settings, flops, heads=1, blocks=2,
    )  # fmt: skip


def cells(measurements: Sequence[Measurement]) -> dict[str, tuple[float, str]]:
    """For each workload and pass: how many times as fast as the fastest peer ours is, and this peer."""
    rows: dict[str, dict[str, float]] = {}
    for each in measurements:
        if each.value is not None and each.unit == "ms":
            rows.setdefault(each.name.rpartition("/")[0], {})[each.way] = each.value
    found = {}
    for row, times in rows.items():
        peers = {way: ms for way, ms in times.items() if not way.startswith(OURS)}
        ours = min((ms for way, ms in times.items() if way.startswith(OURS)), default=None)
        if peers and ours is not None:
            best = min(peers, key=peers.__getitem__)
            found[row] = peers[best] / ours, best
    return found

"""The calls of a step that chooses its blocks, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.benchmarks.speed import check
from experiments.benchmarks.speed.named_calls import timed_rows
from experiments.benchmarks.speed.peers import flashattention4, flashinfer
from experiments.benchmarks.speed.peers.flexattention import compiled, mask_mod, small_tiles
from experiments.benchmarks.speed.peers.runner import Unavailable, planned
from experiments.benchmarks.timing import Timing, recorded
from experiments.training.clock import synchronize
from sparseflash import BlockMask, attention
from sparseflash.attention import Backend
from sparseflash.grouped import selected_attention
from sparseflash.interop import to_flex


@dataclass(frozen=True)
class Case:
    """A sequence whose query heads share a choice of key blocks by groups, and what is run on it."""

    tokens: int
    heads: int
    block: int
    chosen: int  # blocks of a row of the choice
    kv_heads: int | None = None  # by default as many as heads
    dim: int = 128
    causal: bool = True
    by_query: bool = False  # each query has a list of its own (NSA), instead of each block of queries
    attends: bool = True  # otherwise only the choice is timed
    peers: bool = False  # beside FlexAttention, FlashAttention-4 and FlashInfer with the same blocks

    @property
    def choices(self) -> int:
        """Heads of keys, each of which has a choice."""
        return self.kv_heads or self.heads

    @property
    def name(self) -> str:
        """For the table."""
        kind = "causal" if self.causal else "all"
        rows = "a query" if self.by_query else "a block"
        heads = f"{self.heads}:{self.choices} heads"
        return f"{self.tokens:,} tokens, {heads}, {self.chosen} of blocks of {self.block} {rows}, {kind}"


FORWARD_ONLY = "FlashInfer"  # begins the names of peers without a backward
CASES = (
    Case(65_536, 64, 64, 16, attends=False),
    Case(65_536, 64, 128, 16, kv_heads=4, peers=True),
    Case(40_768, 16, 64, 64, causal=False, peers=True),  # a video: a tenth of the blocks
    Case(8_192, 32, 64, 16, kv_heads=4, by_query=True),
    Case(65_536, 32, 64, 16, kv_heads=4, by_query=True),
    Case(16_384, 16, 64, 16),
    Case(16_384, 16, 128, 16, peers=True),
)


@dataclass(frozen=True)
class Call:
    """A call to time. flops: of its two (forward) or seven products of live scores, 0 where nothing is computed.

    like: the call that must have the same results.
    """

    run: Callable[[], Any]
    flops: float = 0.0
    is_peer: bool = False
    like: str | None = None


def index_of(case: Case, device: torch.device) -> Tensor:
    """int32 `[1, choices, rows, chosen]`: random blocks up to the row's own, which is among them if causal."""
    generator = torch.Generator(device).manual_seed(0)
    blocks = -(-case.tokens // case.block)
    rows = case.tokens if case.by_query else blocks
    own = torch.arange(rows, device=device) // (case.block if case.by_query else 1)
    found = torch.empty(1, case.choices, rows, min(case.chosen, blocks), dtype=torch.int32, device=device)
    for head in range(case.choices):  # one after another: the scores of all would need gigabytes
        scores = torch.rand(rows, blocks, generator=generator, device=device)
        if case.causal:
            columns = torch.arange(blocks, device=device)
            scores.masked_fill_(columns > own[:, None], -1.0).masked_fill_(columns == own[:, None], 2.0)
        values, index = scores.topk(found.shape[-1], sorted=False)
        found[0, head] = index.masked_fill(values < 0, -1).int()
    return found


def live_scores(case: Case, index: Tensor) -> int:
    """Scores of all query heads that are computed and not masked."""
    counts = (index >= 0).sum().item()
    rows = 1 if case.by_query else case.block
    live = counts * rows * case.block
    if case.causal:  # the keys after a query in its own block
        blocks = -(-case.tokens // case.block)
        live -= case.choices * blocks * (case.block * (case.block - 1) // 2)
    return int(live * (case.heads // case.choices))


def calls_of(case: Case, device: torch.device) -> dict[str, Call]:
    """By name: the choice alone, attention of a choice made anew, and dense attention to compare with."""
    index = index_of(case, device)
    group = case.heads // case.choices

    def choice() -> BlockMask:
        return BlockMask.from_block_index(index, block=case.block, q_len=case.tokens, causal=case.causal, group=group)

    found = {} if case.by_query else {"choice": Call(choice)}
    if not case.attends:
        return found
    generator = torch.Generator(device).manual_seed(1)
    q, k, v, dout = (
        torch.randn(1, heads, case.tokens, case.dim, generator=generator, device=device).bfloat16()
        for heads in (case.heads, case.choices, case.choices, case.heads)
    )
    wanted = tuple(x.requires_grad_() for x in (q, k, v))

    def chosen(backend: Backend | None = None) -> Tensor:
        if case.by_query:
            return selected_attention(q, k, v, index, span=case.block, causal=case.causal)
        return attention(q, k, v, choice(), backend=backend)

    def dense() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=group > 1)

    def add(name: str, forward: Callable[[], Tensor], live: int, *, like: str | None = None, **given: Any) -> None:
        backward = partial(lambda forward: torch.autograd.grad(forward(), wanted, dout), forward)
        passes = {"forward": (torch.no_grad()(forward), 4.0), "forward + backward": (backward, 14.0)}
        for which, (run, flops) in passes.items():
            if which == "forward" or not name.startswith(FORWARD_ONLY):
                pair = f"{like}, {which}" if like else None
                found[f"{name}, {which}"] = Call(run, flops * case.dim * live, like=pair, **given)

    ours, live = "choice + attention", live_scores(case, index)
    add(ours, chosen, live)
    add("SDPA, dense", dense, case.heads * case.tokens**2 // (2 if case.causal else 1), is_peer=True)
    if case.peers and device.type == "cuda":
        add(f"{ours}, portable kernels", partial(chosen, "triton"), live, like=ours)
        for name, plan in peers_of(case, choice(), q, k, v).items():
            add(f"{name}, blocks known", planned(plan), live, like=ours, is_peer=True)
    return found


def peers_of(
    case: Case, mask: BlockMask, q: Tensor, k: Tensor, v: Tensor
) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    """By name: what makes a peer's call with the blocks of a choice known."""
    by_head = partial(flashinfer.masks_of_heads, mask, q.detach(), k.detach(), v.detach(), causal=case.causal)
    as_rows = partial(flashinfer.heads_as_rows, *by_head.args, **by_head.keywords)
    found: dict[str, Callable[[], Callable[[], Tensor]]] = {
        "sparseflash": lambda: partial(attention, q, k, v, mask),
        "sparseflash, portable kernels": lambda: partial(attention, q, k, v, mask, backend="triton"),
        "FlexAttention": partial(_flex_attention, case, mask, q, k, v),
        "FlashAttention-4": partial(_flash_attention_4, case, mask, q, k, v),
        "FlashInfer, a mask for each head": by_head,
        "FlashInfer, heads as rows": as_rows,
    }
    if not case.causal:  # its kernels for Hopper, which it takes only if asked
        found["FlashInfer, cake"] = partial(by_head, backend="cake")
    return found


def _is_past(q: Any, k: Any) -> Any:
    """The rule of a causal choice's partial tiles, in PyTorch and in the CuTe DSL."""
    return k <= q


def _flex_attention(case: Case, mask: BlockMask, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    return partial(
        compiled(None), q, k, v, enable_gqa=case.heads > case.choices,
        block_mask=to_flex(mask, mask_mod=mask_mod(_is_past) if case.causal else None),
        kernel_options=small_tiles(case.block) if case.block < 128 else None,
    )  # fmt: skip


def _flash_attention_4(case: Case, mask: BlockMask, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    if case.block != 128:
        raise Unavailable("blocks of 128 only")
    package = flashattention4.load()
    options = flashattention4.of_mask(mask, _is_past if case.causal else None, package)

    def run() -> Tensor:
        out: Tensor = package.attention(*(x.transpose(1, 2) for x in (q, k, v)), **options)[0].transpose(1, 2)
        return out

    return run


def host_microseconds(call: Callable[[], object], device: torch.device, *, count: int = 20, rounds: int = 5) -> float:
    """The median over rounds of the host's time for a call, without waiting for the device."""
    found = []
    for _ in range(rounds):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - begin) / count * 1e6)
        synchronize(device)
    return median(found)


def measure(case: Case, device: torch.device, *, round_ms: float = 60.0, host_calls: int = 5) -> list[dict[str, Any]]:
    """A row for each call: milliseconds of the device and useful TFLOP/s, microseconds of the host; ours eager and
    recorded. A peer that fails has its error instead."""
    calls = calls_of(case, device)
    runs: dict[str, Call] = {}
    failures: dict[str, Exception] = {}
    for name, call in calls.items():
        runs[name] = call
        if call.like is not None and (failure := check.failure_of(call.run, calls[call.like].run)):
            failures[name] = failure
        elif not call.is_peer:
            call.run(), call.run()  # compiles
            if device.type == "cuda":
                runs[f"{name}, recorded"] = replace(call, run=recorded(call.run))
    peers = {name for name, call in calls.items() if call.is_peer}

    def numbers(name: str, timing: Timing) -> dict[str, float]:
        host = host_microseconds(runs[name].run, device, count=host_calls)
        return {"tflops": runs[name].flops / timing.ms / 1e9, "host_us": host}

    by_name = {name: call.run for name, call in runs.items()}
    return timed_rows(case.name, by_name, failures, peers, numbers, device, round_ms=round_ms)

"""The calls of a step that chooses its blocks, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.benchmarks.speed.peers import flashattention4
from experiments.benchmarks.speed.peers.flexattention import compiled, mask_mod, small_tiles
from experiments.benchmarks.speed.peers.runner import Unavailable
from experiments.benchmarks.timing import Timed, in_turns, recorded
from experiments.training.clock import synchronize
from sparseflash import BlockMask, attention
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
    peers: bool = False  # beside FlexAttention and FlashAttention-4 with the same blocks

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
    """A call to time. flops: of its two (forward) or seven products of live scores, 0 where nothing is computed."""

    run: Callable[[], object]
    flops: float = 0.0
    is_peer: bool = False


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

    def chosen() -> Tensor:
        if case.by_query:
            return selected_attention(q, k, v, index, span=case.block, causal=case.causal)
        return attention(q, k, v, choice())

    def dense() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=group > 1)

    ways = {"choice + attention": (chosen, live_scores(case, index), False)}
    ways["SDPA, dense"] = dense, case.heads * case.tokens**2 // (2 if case.causal else 1), True
    if case.peers and device.type == "cuda":
        block_mask = to_flex(choice(), mask_mod=mask_mod(_is_past) if case.causal else None)
        flex = partial(
            compiled(None), block_mask=block_mask, enable_gqa=group > 1,
            kernel_options=small_tiles(case.block) if case.block < 128 else None,
        )  # fmt: skip
        ways["FlexAttention, blocks known"] = (lambda: flex(q, k, v)), live_scores(case, index), True
    fa4 = _flash_attention_4(case, choice) if case.peers and device.type == "cuda" else None
    if fa4 is not None:
        ways["FlashAttention-4, blocks known"] = (lambda: fa4(q, k, v)), live_scores(case, index), True
    for name, (forward, live, is_peer) in ways.items():
        once = 4.0 * case.dim * live
        found[f"{name}, forward"] = Call(torch.no_grad()(forward), once, is_peer)
        both = partial(lambda forward: torch.autograd.grad(forward(), wanted, dout), forward)
        found[f"{name}, forward + backward"] = Call(both, 3.5 * once, is_peer)
    return found


def _is_past(q: Any, k: Any) -> Any:
    """The rule of a causal choice's partial tiles, in PyTorch and in the CuTe DSL."""
    return k <= q


def _flash_attention_4(case: Case, choice: Callable[[], BlockMask]) -> Callable[..., Tensor] | None:
    """FlashAttention-4 with the blocks of a choice, if it is installed and has such blocks, on our order of tensors."""
    if case.block != 128:
        return None
    try:
        package = flashattention4.load()
    except Unavailable:
        return None
    options = flashattention4.of_mask(choice(), _is_past if case.causal else None, package)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
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


def measure(case: Case, device: torch.device, *, round_ms: float = 60.0) -> list[dict[str, Any]]:
    """A row for each call: milliseconds of the device and useful TFLOP/s, microseconds of the host; ours eager and
    recorded. A peer that fails has its error instead."""
    calls = calls_of(case, device)
    runs: dict[str, Call] = {}
    for name, call in calls.items():
        runs[name] = call
        if call.is_peer:
            continue
        call.run(), call.run()  # compiles
        if device.type == "cuda":
            runs[f"{name}, recorded"] = replace(call, run=recorded(call.run))
    timings = in_turns(
        {n: Timed(call.run, nullcontext) for n, call in runs.items()}, device, rounds=3, round_ms=round_ms
    )
    rows = []
    for name, timing in timings.items():
        row: dict[str, Any] = {"case": case.name, "call": name}
        if timing.failure is not None:
            if not runs[name].is_peer:
                raise timing.failure
            rows.append(row | {"error": str(timing.failure).splitlines()[0][:200]})
            continue
        host = host_microseconds(runs[name].run, device, count=5)
        tflops = runs[name].flops / timing.ms / 1e9
        rows.append(row | {"ms": timing.ms, "spread": timing.spread, "tflops": tflops, "host_us": host})
    return rows

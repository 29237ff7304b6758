"""The calls of a step that chooses its blocks, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from experiments.benchmarks.timing import Timed, in_turns
from experiments.training.clock import synchronize
from sparseflash import BlockMask, attention


@dataclass(frozen=True)
class Case:
    """tokens of one sequence; chosen blocks of a query block; planned only if attention is not to be run."""

    tokens: int
    heads: int
    block: int
    chosen: int
    dim: int = 128
    causal: bool = True
    attends: bool = True

    @property
    def name(self) -> str:
        """For the table."""
        kind = "causal" if self.causal else "all"
        return f"{self.tokens:,} tokens, {self.heads} heads, {self.chosen} of blocks of {self.block}, {kind}"


CASES = (
    Case(65_536, 64, 64, 16, attends=False),
    Case(65_536, 64, 64, 64, attends=False),
    Case(16_384, 16, 64, 16),
    Case(40_960, 16, 64, 64, causal=False),
    Case(16_384, 16, 128, 16),
)


def calls_of(case: Case, device: torch.device) -> dict[str, Callable[[], object]]:
    """By name: the choice alone, with its plans, and the whole step; dense attention to compare with."""
    generator = torch.Generator(device).manual_seed(0)
    blocks = case.tokens // case.block
    scores = torch.rand(1, case.heads, blocks, blocks, generator=generator, device=device)
    if case.causal:
        scores.masked_fill_(torch.ones(blocks, blocks, dtype=torch.bool, device=device).triu(1), -1.0)
    index = scores.topk(min(case.chosen, blocks), sorted=False).indices.int()
    del scores
    tokens = case.tokens if case.attends else 0
    q, k, v = (
        torch.randn(1, case.heads, tokens, case.dim, generator=generator, device=device).bfloat16().requires_grad_()
        for _ in range(3)
    )

    def choice() -> BlockMask:
        return BlockMask.from_block_index(index, block=case.block, q_len=case.tokens, causal=case.causal)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attention(q, k, v, choice())

    def both() -> object:
        return torch.autograd.grad(attention(q, k, v, choice()), (q, k, v), dout)

    def dense() -> object:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
        return torch.autograd.grad(out, (q, k, v), dout)

    dout = torch.randn_like(q)
    found: dict[str, Callable[[], object]] = {"choice": choice}
    if case.attends:
        found |= {"choice + plan + forward": forward, "choice + plans + forward + backward": both}
        found["SDPA, dense, forward + backward"] = dense
    return found


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


def recorded(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(case: Case, device: torch.device, *, round_ms: float = 60.0) -> list[dict[str, Any]]:
    """A row for each call: milliseconds of the device, microseconds of the host, eager and recorded."""
    calls = calls_of(case, device)
    for call in calls.values():
        call(), call()  # compiles
    timed = {name: Timed(call, nullcontext) for name, call in calls.items()}
    replays = {name: recorded(call) for name, call in calls.items()} if device.type == "cuda" else {}
    timed |= {f"{name}, recorded": Timed(replay, nullcontext) for name, replay in replays.items()}
    timings = in_turns(timed, device, rounds=3, round_ms=round_ms)
    rows = []
    for name, timing in timings.items():
        if timing.failure is not None:
            raise timing.failure
        host = host_microseconds(timed[name].call, device)
        rows.append({"case": case.name, "call": name, "ms": timing.ms, "spread": timing.spread, "host_us": host})
    return rows

"""The calls of one layer of a decoding step, and how long they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.benchmarks.speed import check
from experiments.benchmarks.speed.named_calls import timed_rows
from experiments.benchmarks.speed.peers import flashinfer
from experiments.benchmarks.speed.peers.runner import planned
from experiments.benchmarks.timing import Timing, recorded
from sparseflash.decode import attention_with_cache


@dataclass(frozen=True)
class Case:
    """A batch of sequences that all have `tokens` tokens in their caches, and `new` queries each."""

    batch: int
    tokens: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    new: int = 1
    page: int = 64
    pages: int = 32  # chosen
    window: int = 1024

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.batch} x {self.tokens:,} tokens, {self.heads}:{self.kv_heads} heads, {self.new} new"

    def kept(self, keys: int) -> int:
        """Bytes of that many keys of every sequence, and of their values, in bf16."""
        return 2 * 2 * self.batch * self.kv_heads * self.dim * min(keys, self.tokens)


CASES = (
    Case(1, 65_536),
    Case(8, 65_536),
    Case(64, 65_536),
    Case(16, 8_192),
    Case(1, 131_072, heads=64, kv_heads=4),
    Case(16, 8_192, new=4),
)


class Call(NamedTuple):
    """A call to time, and the bytes of keys and values that it must read. A peer's result is that of "contiguous"."""

    run: Callable[[], Tensor]
    read: int
    is_peer: bool = False


def calls_of(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Call]:
    """By name: the calls."""
    g = torch.Generator(device).manual_seed(0)
    q = torch.randn(case.batch, case.heads, case.new, case.dim, generator=g, device=device).to(dtype)
    shape = (case.batch, case.kv_heads, case.tokens, case.dim)
    k, v = (torch.randn(shape, generator=g, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    lengths = torch.full((case.batch,), case.tokens, dtype=torch.int32, device=device)
    found: dict[str, Call] = {}

    def paged(page: int) -> dict[str, Any]:
        """The caches in shuffled pages."""
        n = case.tokens // page
        table = torch.randperm(case.batch * n, generator=g, device=device).view(case.batch, n).int()
        caches = []
        for x in (k, v):
            pool = torch.empty(case.batch * n, page, case.kv_heads, case.dim, dtype=dtype, device=device)
            pool[table.long()] = x.unflatten(2, (n, page)).permute(0, 2, 3, 1, 4)
            caches.append(pool.transpose(1, 2))
        return {"k_cache": caches[0], "v_cache": caches[1], "block_table": table}

    every = case.kept(case.tokens)
    found["contiguous"] = Call(lambda: attention_with_cache(q, k, v, lengths), every)
    in_pages = {size: paged(size) | {"lengths": lengths} for size in (16, case.page)}
    for size, caches in in_pages.items():
        found[f"pages of {size}"] = Call(partial(attention_with_cache, q, **caches), every)
    large = in_pages[case.page]
    sinks = {"window": case.window, "sinks": 4}
    windowed = partial(attention_with_cache, q, **large, **sinks)
    found[f"window of {case.window}, 4 sinks"] = Call(windowed, case.kept(case.window + 4))
    count = min(case.pages, case.tokens // case.page)
    chosen = torch.rand(case.batch, case.kv_heads, case.tokens // case.page, generator=g, device=device)
    pages = chosen.topk(count).indices.int()
    of_pages = partial(attention_with_cache, q, pages=pages, **large)
    found[f"{count} chosen pages"] = Call(of_pages, case.kept(count * case.page))
    peers: dict[str, Callable[[], Tensor]] = {}
    if case.new == 1:
        peers["SDPA"] = lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    if device.type == "cuda":
        for size, caches in in_pages.items():
            peers[f"FlashInfer, pages of {size}"] = planned(partial(flashinfer.decode_paged, q, **caches))
        if case.batch == case.new == 1:
            peers["FlashInfer, contiguous"] = planned(partial(flashinfer.decode_contiguous, q, k, v))
    return found | {name: Call(run, every, is_peer=True) for name, run in peers.items()}


@torch.no_grad()
def measure(case: Case, device: torch.device, *, round_ms: float = 30.0) -> list[dict[str, Any]]:
    """A row for each call: milliseconds, recorded on a GPU, and gigabytes a second. A peer that fails, or whose result
    is not ours, has the reason instead.
    """
    on_gpu = device.type == "cuda"
    calls = calls_of(case, device, torch.bfloat16 if on_gpu else torch.float32)
    failures = {
        name: failure
        for name, call in calls.items()
        if call.is_peer and (failure := check.failure_of(call.run, calls["contiguous"].run))
    }
    runs = {name: recorded(call.run) if on_gpu and name not in failures else call.run for name, call in calls.items()}
    peers = {name for name, call in calls.items() if call.is_peer}

    def numbers(name: str, timing: Timing) -> dict[str, float]:
        return {"gb_per_s": calls[name].read / timing.ms / 1e6}

    return timed_rows(case.name, runs, failures, peers, numbers, device, round_ms=round_ms)

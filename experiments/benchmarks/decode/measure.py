"""The calls of one layer of a decoding step, and how long they take."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.benchmarks.timing import Timed, in_turns, recorded
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


def calls_of(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, tuple[Callable[[], Tensor], int]]:
    """By name: the call, and the bytes of keys and values that it must read."""
    g = torch.Generator(device).manual_seed(0)
    q = torch.randn(case.batch, case.heads, case.new, case.dim, generator=g, device=device).to(dtype)
    shape = (case.batch, case.kv_heads, case.tokens, case.dim)
    k, v = (torch.randn(shape, generator=g, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    lengths = torch.full((case.batch,), case.tokens, dtype=torch.int32, device=device)
    found: dict[str, tuple[Callable[[], Tensor], int]] = {}

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

    found["contiguous"] = (lambda: attention_with_cache(q, k, v, lengths)), case.kept(case.tokens)
    small, large = paged(16), paged(case.page)
    found["pages of 16"] = (lambda: attention_with_cache(q, lengths=lengths, **small)), case.kept(case.tokens)
    found[f"pages of {case.page}"] = (lambda: attention_with_cache(q, lengths=lengths, **large)), case.kept(case.tokens)
    sinks = {"window": case.window, "sinks": 4}
    found[f"window of {case.window}, 4 sinks"] = (
        (lambda: attention_with_cache(q, lengths=lengths, **large, **sinks)), case.kept(case.window + 4)
    )  # fmt: skip
    count = min(case.pages, case.tokens // case.page)
    chosen = torch.rand(case.batch, case.kv_heads, case.tokens // case.page, generator=g, device=device)
    pages = chosen.topk(count).indices.int()
    found[f"{count} chosen pages"] = (
        (lambda: attention_with_cache(q, lengths=lengths, pages=pages, **large)), case.kept(count * case.page)
    )  # fmt: skip
    if case.new == 1:
        found["SDPA"] = (lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)), case.kept(case.tokens)
    return found


@torch.no_grad()
def measure(case: Case, device: torch.device, *, round_ms: float = 30.0) -> list[dict[str, Any]]:
    """A row for each call: milliseconds, recorded on a GPU, and gigabytes a second."""
    on_gpu = device.type == "cuda"
    calls = calls_of(case, device, torch.bfloat16 if on_gpu else torch.float32)
    runs = {name: recorded(call) if on_gpu else call for name, (call, _) in calls.items()}
    timings = in_turns({n: Timed(call, nullcontext) for n, call in runs.items()}, device, rounds=3, round_ms=round_ms)
    rows = []
    for name, timing in timings.items():
        if timing.failure is not None:
            raise timing.failure
        speed = calls[name][1] / timing.ms / 1e6
        rows.append({"case": case.name, "call": name, "ms": timing.ms, "spread": timing.spread, "gb_per_s": speed})
    return rows

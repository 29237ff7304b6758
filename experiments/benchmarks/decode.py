"""`python -m experiments.benchmarks.decode`: new tokens over a long cache, beside SDPA and FlashInfer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from experiments.benchmarks.harness import Bench, Commit, Device, Out, Way
from experiments.benchmarks.speed.peers import flashinfer
from experiments.benchmarks.speed.peers.runner import planned
from sparseflash.decode import attention_with_cache

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Case:
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
        return f"{self.batch}x{self.tokens}-heads{self.heads}of{self.kv_heads}-new{self.new}"

    def kept(self, keys: int) -> int:
        return 2 * 2 * self.batch * self.kv_heads * self.dim * min(keys, self.tokens)


CASES = (
    Case(1, 65_536),
    Case(8, 65_536),
    Case(64, 65_536),
    Case(16, 8_192),
    Case(1, 131_072, heads=64, kv_heads=4),
    Case(16, 8_192, new=4),
)


SMALL = (Case(2, 256, heads=4, kv_heads=2, dim=16, pages=2, window=32),)


def ways_of(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Way]:
    g = torch.Generator(device).manual_seed(0)
    q = torch.randn(case.batch, case.heads, case.new, case.dim, generator=g, device=device).to(dtype)
    shape = (case.batch, case.kv_heads, case.tokens, case.dim)
    k, v = (torch.randn(shape, generator=g, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    lengths = torch.full((case.batch,), case.tokens, dtype=torch.int32, device=device)
    found: dict[str, Way] = {}

    def add(name: str, run: Callable[[], Tensor], read: int, like: str | None = None) -> None:
        found[name] = Way(run, settings={"bytes": read}, like=like, recorded=True, peer=like is not None)

    def paged(page: int) -> dict[str, Any]:
        n = case.tokens // page
        table = torch.randperm(case.batch * n, generator=g, device=device).view(case.batch, n).int()
        caches = []
        for x in (k, v):
            pool = torch.empty(case.batch * n, page, case.kv_heads, case.dim, dtype=dtype, device=device)
            pool[table.long()] = x.unflatten(2, (n, page)).permute(0, 2, 3, 1, 4)
            caches.append(pool.transpose(1, 2))
        return {"k_cache": caches[0], "v_cache": caches[1], "block_table": table}

    every, contiguous = case.kept(case.tokens), "contiguous/sparseflash"
    add(contiguous, lambda: attention_with_cache(q, k, v, lengths), every)
    in_pages = {size: paged(size) | {"lengths": lengths} for size in (16, case.page)}
    for size, caches in in_pages.items():
        add(f"pages-of-{size}/sparseflash", partial(attention_with_cache, q, **caches), every)
    large = in_pages[case.page]
    windowed = partial(attention_with_cache, q, **large, window=case.window, sinks=4)
    add(f"window-{case.window}-and-4-sinks/sparseflash", windowed, case.kept(case.window + 4))
    count = min(case.pages, case.tokens // case.page)
    chosen = torch.rand(case.batch, case.kv_heads, case.tokens // case.page, generator=g, device=device)
    pages = chosen.topk(count).indices.int()
    of_pages = partial(attention_with_cache, q, pages=pages, **large)
    add(f"{count}-chosen-pages/sparseflash", of_pages, case.kept(count * case.page))
    if case.new == 1:
        add("contiguous/sdpa", lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), every, contiguous)
    if device.type == "cuda":
        for size, caches in in_pages.items():
            plan = partial(flashinfer.decode_paged, q, **caches)
            add(f"pages-of-{size}/flashinfer", planned(plan), every, contiguous)
        if case.batch == case.new == 1:
            plan = partial(flashinfer.decode_contiguous, q, k, v)
            add("contiguous/flashinfer", planned(plan), every, contiguous)
    return found


@app.command()
def decode(
    out: Out = Path("runs/decode"),
    device: Device = "cuda",
    small: Annotated[bool, typer.Option("--small", help="One small case, to try it.")] = False,
    commit: Commit = None,
) -> None:
    """Measure one layer of a decoding step: contiguous and paged caches, windows, chosen pages, SDPA and FlashInfer."""
    bench = Bench.start(
        "decode", device, commit, out, round_ms=0.0 if small else 30.0, packages=("flashinfer-python",)
    )  # fmt: skip
    with torch.no_grad():
        for case in SMALL if small else CASES:
            dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
            bench.time(case.name, ways_of(case, bench.device, dtype))
    bench.finish()


if __name__ == "__main__":
    app()

"""`python -m experiments.benchmarks selection blocks`: choosing blocks at every step, beside dense attention and peers
that are given the blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from experiments.benchmarks.harness import Bench, Cases, Commit, Device, Out, Unavailable, Way, matching, passes
from experiments.benchmarks.speed.peers import flashattention4, flashinfer
from experiments.benchmarks.speed.peers.flexattention import compiled, small_tiles
from experiments.benchmarks.speed.peers.runner import planned
from experiments.benchmarks.timing import host_microseconds
from sparseflash import BlockMask, attention
from sparseflash.attention import Backend
from sparseflash.grouped import selected_attention
from sparseflash.interop import to_flex


@dataclass(frozen=True)
class Case:
    """Query heads share a choice of key blocks by groups."""

    tokens: int
    heads: int
    block: int
    chosen: int  # blocks of a row
    kv_heads: int | None = None  # by default as many as heads
    dim: int = 128
    causal: bool = True
    by_query: bool = False  # each query has a list (NSA), not each block
    attends: bool = True  # otherwise only the choice is timed
    peers: bool = False  # beside FlexAttention, FlashAttention-4 and FlashInfer with the same blocks

    @property
    def choices(self) -> int:
        return self.kv_heads or self.heads

    @property
    def name(self) -> str:
        kind = "causal" if self.causal else "all"
        rows = "query" if self.by_query else "block"
        return f"{self.tokens}-heads{self.heads}of{self.choices}-{kind}-{self.chosen}x{self.block}-a-{rows}"


FORWARD_ONLY = "flashinfer"  # have no backward
CASES = (
    Case(65_536, 64, 64, 16, attends=False),
    Case(65_536, 64, 128, 16, kv_heads=4, peers=True),
    Case(40_768, 16, 64, 64, causal=False, peers=True),
    Case(8_192, 32, 64, 16, kv_heads=4, by_query=True),
    Case(65_536, 32, 64, 16, kv_heads=4, by_query=True),
    Case(16_384, 16, 64, 16),
    Case(16_384, 16, 128, 16, peers=True),
)


SMALL = (
    Case(256, 2, 32, 2, attends=False),
    Case(256, 4, 32, 2, kv_heads=2, dim=16),
    Case(256, 4, 32, 2, kv_heads=2, dim=16, by_query=True),
)


def index_of(case: Case, device: torch.device) -> Tensor:
    """int32 `[1, choices, rows, chosen]`: random blocks up to the row's own, which is among them if causal."""
    generator = torch.Generator(device).manual_seed(0)
    blocks = -(-case.tokens // case.block)
    rows = case.tokens if case.by_query else blocks
    own = torch.arange(rows, device=device) // (case.block if case.by_query else 1)
    found = torch.empty(1, case.choices, rows, min(case.chosen, blocks), dtype=torch.int32, device=device)
    for head in range(case.choices):  # the scores of all would need gigabytes
        scores = torch.rand(rows, blocks, generator=generator, device=device)
        if case.causal:
            columns = torch.arange(blocks, device=device)
            scores.masked_fill_(columns > own[:, None], -1.0).masked_fill_(columns == own[:, None], 2.0)
        values, index = scores.topk(found.shape[-1], sorted=False)
        found[0, head] = index.masked_fill(values < 0, -1).int()
    return found


def live_scores(case: Case, index: Tensor) -> int:
    counts = (index >= 0).sum().item()
    rows = 1 if case.by_query else case.block
    live = counts * rows * case.block
    if case.causal:  # the keys after a query in its own block
        blocks = -(-case.tokens // case.block)
        live -= case.choices * blocks * (case.block * (case.block - 1) // 2)
    return int(live * (case.heads // case.choices))


def ways_of(case: Case, device: torch.device) -> dict[str, Way]:
    index = index_of(case, device)
    group = case.heads // case.choices

    def choice() -> BlockMask:
        return BlockMask.from_block_index(index, block=case.block, q_len=case.tokens, causal=case.causal, group=group)

    found = {} if case.by_query else {"choice/sparseflash": Way(choice)}
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

    def add(
        what: str, name: str, forward: Callable[[], Tensor], live: int, *, same: bool = True, peer: bool = False
    ) -> None:
        products = {"forward": 2, "both": 7}
        for which, call in passes(forward, wanted, dout).items():
            if which == "forward" or not name.startswith(FORWARD_ONLY):
                settings = {"flops": 2.0 * products[which] * case.dim * live}
                like = f"chosen/{which}/sparseflash" if same else None
                found[f"{what}/{which}/{name}"] = Way(call, settings=settings, like=like, peer=peer)

    live = live_scores(case, index)
    add("chosen", "sparseflash", chosen, live, same=False)
    add("dense", "sdpa", dense, case.heads * case.tokens**2 // (2 if case.causal else 1), same=False, peer=True)
    if case.peers and device.type == "cuda":
        add("chosen", "sparseflash-portable", partial(chosen, "triton"), live)
        for name, plan in peers_of(case, choice(), q, k, v).items():
            add("known", name, planned(plan), live, peer=True)
    return found


def peers_of(
    case: Case, mask: BlockMask, q: Tensor, k: Tensor, v: Tensor
) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    by_head = partial(flashinfer.masks_of_heads, mask, q.detach(), k.detach(), v.detach(), causal=case.causal)
    as_rows = partial(flashinfer.heads_as_rows, *by_head.args, **by_head.keywords)
    found: dict[str, Callable[[], Callable[[], Tensor]]] = {
        "sparseflash": lambda: partial(attention, q, k, v, mask),
        "sparseflash-portable": lambda: partial(attention, q, k, v, mask, backend="triton"),
        "flex": partial(_flex_attention, case, mask, q, k, v),
        "fa4": partial(_flash_attention_4, case, mask, q, k, v),
        "flashinfer-a-mask-for-each-head": by_head,
        "flashinfer-heads-as-rows": as_rows,
    }
    if not case.causal:  # only if asked
        found["flashinfer-cake"] = partial(by_head, backend="cake")
    return found


def _is_past(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


def _flex_attention(case: Case, mask: BlockMask, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    return partial(
        compiled(None), q, k, v, enable_gqa=case.heads > case.choices,
        block_mask=to_flex(mask, mask_mod=_is_past if case.causal else None),
        kernel_options=small_tiles(case.block) if case.block < 128 else None,
    )  # fmt: skip


def _flash_attention_4(case: Case, mask: BlockMask, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    if case.block != 128:
        raise Unavailable("blocks of 128 only")
    options = flashattention4.of_mask(mask, _is_past if case.causal else None, flashattention4.load())
    return partial(flashattention4.call(**options), q, k, v)


def blocks(
    out: Out = Path("runs/selection-cost"),
    device: Device = "cuda",
    small: Annotated[bool, typer.Option("--small", help="Three small cases, to try it.")] = False,
    cases: Cases = "*",
    commit: Commit = None,
) -> None:
    """Measure the choice of blocks, its plan and attention, eager and recorded, and peers with the same blocks.

    On a GPU, microseconds of the host are measured, too.
    """
    found = matching(cases, SMALL if small else CASES)
    bench = Bench.start(
        "selection", device, commit, out, round_ms=0.0 if small else 60.0, packages=("flashinfer-python",)
    )  # fmt: skip
    for case in found:
        measure(bench, case, host_calls=1 if small else 5)
    bench.finish()


def measure(bench: Bench, case: Case, *, host_calls: int) -> None:
    ways = ways_of(case, bench.device)
    if bench.device.type == "cuda":
        ways |= {f"{name}-recorded": replace(way, recorded=True) for name, way in ways.items() if not way.peer}
    timings = bench.time(case.name, ways)
    for name, timing in timings.items():
        if timing.failure is None:
            host = host_microseconds(bench.timed[name].call, bench.device, count=host_calls)
            bench.add(f"{case.name}/host/{name}", host, "us")
    bench.save()

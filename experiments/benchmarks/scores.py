"""`python -m experiments.benchmarks scores`: the cost of score modifications, beside plain attention and Flex."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from experiments.benchmarks.fresh_process import answer_of
from experiments.benchmarks.harness import Bench, Commit, Device, Out, Rounds, Way, chosen, passes
from experiments.benchmarks.interpreter import run_kernels_on
from experiments.benchmarks.timing import first_call
from sparseflash import BlockMask, attention, interop, masks, scores

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

NAMES = ("alibi", "fixed_alibi", "softcap", "sink", "table", "key_bias", "bias", "tile_bias", "function")


@dataclass(frozen=True)
class Case:
    name: str
    learned: tuple[Tensor, ...]  # require gradients
    changes: Callable[[], Any]  # the argument scores=
    score_mod: ScoreMod | None  # None: FlexAttention has none


def case(name: str, heads: int, mask: BlockMask, dtype: torch.dtype) -> Case:
    generator = torch.Generator(mask.device).manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=mask.device, dtype=dtype).requires_grad_()

    if name in ("alibi", "fixed_alibi"):
        slopes = leaf(heads) if name == "alibi" else leaf(heads).detach()
        learned = (slopes,) if name == "alibi" else ()
        return Case(name, learned, lambda: scores.alibi(slopes), lambda s, b, h, q, k: s - slopes[h] * (q - k).abs())
    if name == "softcap":
        return Case(name, (), lambda: scores.softcap(50.0), lambda s, b, h, q, k: 50.0 * torch.tanh(s / 50.0))
    if name == "sink":
        logits = leaf(heads)
        return Case(name, (logits,), lambda: scores.sink(logits), None)
    if name == "table":
        table, bucket = leaf(heads, 32), scores.t5_buckets(32, 128)
        relative = scores.relative(table, bucket)
        return Case(name, (table,), lambda: relative, lambda s, b, h, q, k: s + table[h, bucket(k - q)])
    if name == "key_bias":
        bias = leaf(1, heads, mask.k_len)
        return Case(name, (bias,), lambda: scores.key_bias(bias), lambda s, b, h, q, k: s + bias[0, h, k])
    if name == "bias":
        bias = leaf(1, heads, mask.q_len, mask.k_len)
        return Case(name, (bias,), lambda: scores.bias(bias), lambda s, b, h, q, k: s + bias[0, h, q, k])
    if name == "tile_bias":
        values = leaf(1, heads, len(mask.indices), mask.block_q, mask.block_k)
        number = (mask.to_layout().flatten().cumsum(0) - 1).int().view(mask.blocks)

        def of_tile(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            tile = number[q // mask.block_q, k // mask.block_k]
            return s + values[0, h, tile, q % mask.block_q, k % mask.block_k]

        return Case(name, (values,), lambda: scores.tile_bias(values, mask), of_tile)
    gains = leaf(heads)

    def near(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, gain: Tensor) -> Tensor:
        return torch.where((q - k).abs() < 256, s * gain[h], s)

    made = scores.function(near, gains)
    return Case(name, (gains,), lambda: made, lambda s, b, h, q, k: near(s, b, h, q, k, gains))


OURS, FLEX = "sparseflash", "flex"
PLAIN = "plain"
BACKENDS = {"auto": None, "triton": "triton", "hopper": "hopper"}


class Attended(NamedTuple):
    run: Callable[[], Tensor]
    wanted: Sequence[Tensor]


class Sizes(NamedTuple):
    length: int
    heads: int
    dim: int
    device: str
    backend: str  # of BACKENDS


class Ways:
    def __init__(self, sizes: Sizes) -> None:
        self.place, self.dim = torch.device(sizes.device), sizes.dim
        self.ours = {"triton": f"{OURS}-portable", "hopper": f"{OURS}-hopper"}.get(sizes.backend, OURS)
        on_gpu = self.place.type == "cuda"
        # attention() takes another on a CPU.
        self.backend = BACKENDS[sizes.backend] if on_gpu else "triton"
        generator = torch.Generator(self.place).manual_seed(0)
        shape, dtype = (1, sizes.heads, sizes.length, sizes.dim), torch.bfloat16 if on_gpu else torch.float16
        *self.leaves, self.dout = (
            torch.randn(shape, generator=generator, device=self.place, dtype=dtype) for _ in range(4)
        )
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.mask = masks.causal(sizes.length).to(self.place)

    def cases(self, names: Sequence[str]) -> list[Case]:
        q = self.leaves[0]
        return [case(name, q.shape[1], self.mask, q.dtype) for name in names]

    def plain(self, library: str) -> Attended:
        if library == FLEX:
            return Attended(self._flex, self.leaves)
        return Attended(lambda: attention(*self.leaves, self.mask, backend=self.backend), self.leaves)

    def changed(self, case: Case, library: str) -> Attended | None:
        wanted = [*self.leaves, *case.learned]
        if library == FLEX:
            return None if case.score_mod is None else Attended(lambda: self._flex(score_mod=case.score_mod), wanted)
        return Attended(
            lambda: attention(*self.leaves, self.mask, scores=case.changes(), backend=self.backend), wanted
        )  # fmt: skip

    @cached_property
    def _flex(self) -> Callable[..., Any]:
        from torch.nn.attention.flex_attention import flex_attention

        from experiments.benchmarks.speed.peers.flexattention import compiled

        call = compiled(None) if self.place.type == "cuda" else flex_attention
        block_mask = interop.to_flex(self.mask, mask_mod=lambda b, h, q, k: k <= q)
        return lambda **changes: call(*self.leaves, block_mask=block_mask, **changes)


def seconds_of(name: str, library: str, sizes: Sizes) -> dict[str, float]:
    found: dict[str, float] = answer_of(measured, name, library, sizes)
    return found


def measured(name: str, library: str, sizes: Sizes) -> dict[str, float]:
    ways = Ways(sizes)
    run_kernels_on(ways.place.type)
    (case,) = ways.cases([name])
    seconds = {}
    changed = ways.changed(case, library)
    for label, way in ((PLAIN, ways.plain(library)), (name, changed)) if changed is not None else ():
        for what, call in passes(way.run, way.wanted, ways.dout).items():
            seconds[f"{label}-{what}/{library}"], _ = first_call(call, ways.place)
    return seconds


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    case: Annotated[list[str] | None, typer.Option(help="May be repeated.", show_default="all")] = None,
    flex: Annotated[bool, typer.Option("--flex", help="Time FlexAttention with the same score_mod, too.")] = False,
    first: Annotated[bool, typer.Option("--first", help="Instead: seconds of first calls, caches empty.")] = False,
    length: Annotated[int, typer.Option(help="Tokens.")] = 8192,
    heads: Annotated[int, typer.Option(help="Heads of one batch element.")] = 16,
    dim: Annotated[int, typer.Option(help="Head dim.")] = 128,
    backend: Annotated[str, typer.Option(help="auto, triton (the portable kernels) or hopper.")] = "auto",
    rounds: Rounds = 5,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = Path("runs/scores"),
) -> None:
    """Time causal attention in bf16 with each score modification, beside plain attention with the same --backend.

    Plain attention may take other kernels: see explain(). All cases take about a minute of an H100, with --flex four of
    an H200, with --first half a minute each.
    """
    names = chosen("--case", case, NAMES)
    chosen("--backend", [backend], BACKENDS)
    bench = Bench.start("scores", device, commit, out, rounds=rounds, round_ms=30.0)
    sizes, libraries = Sizes(length, heads, dim, device, backend), (OURS, FLEX) if flex else (OURS,)
    ways = Ways(sizes)
    if first:
        for name, library in product(names, libraries):
            _first_use(bench, name, library, sizes)
    else:
        _times(bench, names, libraries, ways, {"heads": heads, "tokens": length})
    bench.finish(over=f"{ways.ours}-{PLAIN}")


def _times(bench: Bench, names: list[str], libraries: tuple[str, ...], ways: Ways, settings: dict[str, object]) -> None:
    plain = {library: ways.plain(library) for library in libraries}
    groups = {PLAIN: plain} if len(libraries) > 1 else {}
    for each in ways.cases(names):
        changed = {library: way for library in libraries if (way := ways.changed(each, library)) is not None}
        groups[each.name] = changed | {f"{ways.ours}-{PLAIN}": plain[OURS]}
    for name, group in groups.items():
        timed = {
            f"{what}/{ways.ours if library == OURS else library}": Way(call, settings=settings, peer=library == FLEX)
            for library, way in group.items()
            for what, call in passes(way.run, way.wanted, ways.dout).items()
        }
        bench.time(f"{ways.dim}/{name}", timed)


def _first_use(bench: Bench, name: str, library: str, sizes: Sizes) -> None:
    try:
        for what, seconds in seconds_of(name, library, sizes).items():
            if f"scores/first-use/{what}" not in [each.name for each in bench.measurements]:
                bench.add(f"first-use/{what}", seconds, "s")
    except RuntimeError as failure:
        bench.add(f"first-use/{name}-forward/{library}", None, "s", failure=str(failure))
    bench.save()


if __name__ == "__main__":
    app()

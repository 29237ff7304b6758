from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.benchmarks.harness import Unavailable, Way, failure_of, passes
from experiments.benchmarks.selection import dense
from experiments.benchmarks.selection.shapes import VIDEOS, WIDTH, Shape
from experiments.benchmarks.speed.peers.runner import Inputs, planned
from sparseflash import BlockMask, selection
from sparseflash.selection.frame import Frame


@dataclass
class Case:
    shape: Shape
    tokens: int
    layer: nn.Module
    x: Tensor
    inputs: Inputs
    place: Any  # the frame of the queries, or the cubes of the video

    @property
    def wanted(self) -> tuple[Tensor, ...]:
        q, k, v, _ = self.inputs.tensors
        own = [p for name, p in self.layer.named_parameters() if name.startswith(("gate", "compress", "places"))]
        return (q, k, *(() if self.shape.shared else (v,)), *own)

    def attend(self) -> Tensor:
        q, k, v, _ = self.inputs.tensors
        out: Tensor = self.layer.mix(self.x, q, k, v, self.place, *([None] if self.shape.causal else []))
        return out

    def attend_by_mask(self) -> Tensor:
        """With a mask of the chosen spans in place of kernels that gather tokens."""
        self.layer.backend = "hopper"
        try:
            return self.attend()
        finally:
            self.layer.backend = None

    def choice(self) -> Callable[[], BlockMask | Tensor]:
        calls: list[Callable[[], BlockMask | Tensor]] = []
        real = self.layer.choice

        def watched(*args: Any) -> BlockMask | Tensor:
            calls.append(torch.no_grad()(partial(real, *args)))
            return calls[-1]()

        self.layer.choice = watched
        try:
            with torch.no_grad():
                self.attend()
        finally:
            del self.layer.choice
        return calls[0]


def case_of(shape: Shape, tokens: int, device: torch.device, dtype: torch.dtype) -> Case:
    generator = torch.Generator(device).manual_seed(tokens)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device, dtype=dtype)

    torch.manual_seed(0)
    more = {} if shape.shared else {"head_dim": shape.dim}
    layer = shape.kind(
        WIDTH, shape.heads, shape.kv_heads, **more, **shape.options, device=device, dtype=dtype
    ).eval()  # fmt: skip
    pairs = getattr(layer, "pairs", 1)
    q, k = drawn(1, shape.heads, tokens, shape.dim), drawn(1, pairs * shape.kv_heads, tokens, shape.dim)
    v = k[..., :0] if shape.shared else drawn(1, pairs * shape.kv_heads, tokens, shape.values).requires_grad_()
    dout = drawn(1, shape.heads, tokens, shape.values)
    x = drawn(1, tokens, WIDTH)
    place = Frame(0, tokens, device) if shape.causal else layer.layout(VIDEOS[tokens], 0, x)
    return Case(shape, tokens, layer, x, Inputs(q.requires_grad_(), k.requires_grad_(), v, dout), place)


def live_scores(case: Case, chosen: BlockMask | Tensor) -> int:
    if isinstance(chosen, BlockMask):
        return round(chosen.density * case.tokens**2) * case.shape.heads
    span = getattr(case.layer, "block", getattr(case.layer, "span", 1))
    place = torch.arange(case.tokens, device=chosen.device)[:, None]
    live = 0
    for head in range(chosen.shape[1]):
        begin = chosen[0, head].long() * span
        live += int(torch.where(begin < 0, 0, (place + 1 - begin).clamp(0, span)).sum())
    live *= case.shape.heads // chosen.shape[1]
    if isinstance(case.layer, selection.NativeSparseAttention):
        near = (place + 1).clamp(max=case.layer.window)
        past = ((place + 1 - case.layer.compression) // case.layer.stride + 1).clamp(min=0)
        live += case.shape.heads * int((near + past).sum())
    return live


def flops(live: int, dim: int, value_dim: int) -> dict[str, float]:
    """Of a forward, and of both passes: two and seven products of live scores."""
    forward = 2.0 * live * (dim + value_dim)
    return {"forward": forward, "both": forward + 2.0 * live * (3 * dim + 2 * value_dim)}


def own_ways(case: Case) -> dict[str, Way]:
    choice = case.choice()
    rates = flops(live_scores(case, choice()), case.shape.dim, case.shape.values)
    found = {"choice/sparseflash": Way(choice, peer=True)}
    for name, call in passes(case.attend, case.wanted, case.inputs.dout).items():
        way = Way(call, settings={"flops": rates[name]}, peer=True)  # a failure must not end the run
        found[f"{name}/sparseflash"] = way
        if case.x.device.type == "cuda":
            found[f"{name}/sparseflash-recorded"] = replace(way, recorded=True)
    if case.shape.kind is selection.SpanSelection and case.x.device.type == "cuda":
        for name, call in passes(case.attend_by_mask, case.wanted, case.inputs.dout).items():
            found[f"{name}/sparseflash-by-mask"] = Way(call, settings={"flops": rates[name]}, peer=True)
    return found


def dense_ways(case: Case, name: str, make: Callable[[Inputs, bool], Callable[[], Tensor]]) -> dict[str, Way]:
    shape, like = case.shape, {"device": case.x.device, "dtype": case.x.dtype}
    kv_heads, dim, value_dim = shape.of_dense
    sizes = (shape.heads, dim), (kv_heads, dim), (kv_heads, value_dim), (shape.heads, value_dim)
    q, k, v, dout = (torch.randn(1, heads, case.tokens, features, **like) for heads, features in sizes)
    inputs = Inputs(*(x.requires_grad_() for x in (q, k, v)), dout)
    rates = flops(shape.heads * case.tokens**2 // (2 if shape.causal else 1), dim, value_dim)
    call = planned(partial(make, inputs, shape.causal))
    return {
        f"{which}/{name}": Way(run, settings={"flops": rates[which]}, peer=True)
        for which, run in passes(call, inputs.tensors[:3], dout).items()
    }


def flex_ways(case: Case, name: str) -> dict[str, Way]:
    shape, (q, k, v, dout) = case.shape, case.inputs.tensors
    if shape.shared:
        raise Unavailable("keys that hold their values")
    own = [q, *(x.detach()[:, : shape.kv_heads].requires_grad_() for x in (k, v))]
    chosen = case.choice()()
    span = getattr(case.layer, "block", getattr(case.layer, "span", 1))
    call = planned(partial(dense.flex, Inputs(*own, dout), chosen, span))
    rates = flops(live_scores(case, chosen), shape.dim, shape.values)
    both = passes(call, own, dout)
    if not hasattr(case.layer, "gate"):
        failure = failure_of(both["forward"], torch.no_grad()(case.attend))
        if failure is not None:
            raise failure
    return {f"{which}/{name}": Way(run, settings={"flops": rates[which]}, peer=True) for which, run in both.items()}

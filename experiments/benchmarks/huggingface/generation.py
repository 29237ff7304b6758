"""Greedy generation: compares the tokens with "eager", and times them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from experiments.benchmarks.harness import Bench, reason, slug
from experiments.benchmarks.huggingface.implementations import recorded_as, release, with_attention
from experiments.training.clock import synchronize
from experiments.training.environment import peak_memory

DYNAMIC, STATIC, COMPILED = "dynamic cache", "static cache", "static cache, compiled"
CHECKED_PROMPT, CHECKED_NEW, CHECKED_LEFT = 100, 32, 13
SAME = "the same"


@dataclass(frozen=True)
class Way:
    implementation: str
    cache: str

    def __str__(self) -> str:
        return f"{self.implementation}, {self.cache}"

    @property
    def path(self) -> str:
        return f"{slug(self.cache)}/{recorded_as(self.implementation)}"

    @property
    def options(self) -> dict[str, Any]:
        """`generate` by itself compiles the steps after the prompt with a static cache on a GPU."""
        if self.cache == DYNAMIC:
            return {}
        return {"cache_implementation": "static", "disable_compile": self.cache == STATIC}


@dataclass
class _Stamps:
    device: torch.device
    seconds: list[float] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        synchronize(self.device)
        self.seconds.append(time.perf_counter())

    def end(self) -> None:
        pass


def generated(model: nn.Module, ids: Tensor, new: int, way: Way, **options: Any) -> Tensor:
    choice = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    tokens: Tensor = model.generate(ids, **choice, **way.options, **options)  # type: ignore[operator]
    return tokens[:, ids.shape[1] :]


def drawn(model: nn.Module, batch: int, length: int) -> Tensor:
    config: Any = model.config
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, config.vocab_size, (batch, length), generator=generator).to(next(model.parameters()).device)


def same_tokens(model: nn.Module, ways: Sequence[Way]) -> dict[str, str]:
    ids = drawn(model, 2, CHECKED_PROMPT)
    tokens = torch.ones_like(ids)
    tokens[0, :CHECKED_LEFT] = 0
    first = Way("eager", DYNAMIC)
    want = generated(with_attention(model, "eager"), ids, CHECKED_NEW, first, attention_mask=tokens)
    found = {}
    for way in ways:
        try:
            got = generated(with_attention(model, way.implementation), ids, CHECKED_NEW, way, attention_mask=tokens)
            apart = (got != want).any(0).nonzero()
            found[str(way)] = f"differ from token {int(apart[0]) + 1} on" if len(apart) else SAME
        except Exception as failure:
            found[str(way)] = reason(failure)
    return found


def measure(
    bench: Bench, model: nn.Module, ways: Sequence[Way], prompt: int, batch: int, *, new: int, late: Callable[[], bool]
) -> None:
    ids = drawn(model, batch, prompt)
    models: dict[str, nn.Module] = {}
    failures: dict[Way, str] = {}
    rounds: dict[Way, list[tuple[float, float]]] = {way: [] for way in ways}  # ms of the prompt and of a token
    for number in range(bench.rounds + 1):
        for way in ways:
            if way in failures:
                continue
            if late():
                if not rounds[way]:
                    failures[way] = "out of time"
                continue
            try:
                if way.implementation not in models:
                    models[way.implementation] = with_attention(model, way.implementation)
                if bench.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(bench.device)
                begin = time.perf_counter()
                stamps = _Stamps(bench.device)
                generated(models[way.implementation], ids, new, way, streamer=stamps)
                if number == 0:
                    bench.add(f"{batch}x{prompt}-first/{way.path}", time.perf_counter() - begin, "s")
                    if (peak := peak_memory(bench.device)) is not None:
                        bench.add(f"{batch}x{prompt}-peak/{way.path}", peak / 2**30, "GiB")
                    continue
                took = [1e3 * (after - before) for before, after in pairwise(stamps.seconds)]
                rounds[way].append((took[0], median(took[1:])))
            except Exception as failure:
                failures[way] = reason(failure)
            release(bench.device)
    for way, found in rounds.items():
        of_rounds = list(zip(*found, strict=True)) if way not in failures else [(), ()]
        for what, times, items in zip(("-prompt", ""), of_rounds, (batch * prompt, batch), strict=True):
            path = f"{batch}x{prompt}{what}/{way.path}"
            if way in failures:
                bench.add(path, None, "ms", failure=failures[way])
            else:
                value = median(times)
                bench.add(path, value, "ms", spread=(max(times) - min(times)) / value, items=items, of="tokens/s")
    bench.save()

"""Tokens that a model generates greedily: are they those of "eager", and how long do they take?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from experiments.benchmarks.huggingface.implementations import reason, release, with_attention
from experiments.training.clock import synchronize
from experiments.training.environment import peak_memory

DYNAMIC, STATIC, COMPILED = "dynamic cache", "static cache", "static cache, compiled"
CHECKED_PROMPT, CHECKED_NEW, CHECKED_LEFT = 100, 32, 13
SAME = "the same"
NAN = float("nan")


@dataclass(frozen=True)
class Way:
    """An attention implementation and a kind of cache."""

    implementation: str
    cache: str

    def __str__(self) -> str:
        return f"{self.implementation}, {self.cache}"

    @property
    def options(self) -> dict[str, Any]:
        """Of `generate`. With a static cache on a GPU it compiles by itself what follows the prompt."""
        if self.cache == DYNAMIC:
            return {}
        return {"cache_implementation": "static", "disable_compile": self.cache == STATIC}


@dataclass
class Row:
    """The times of one way for prompts of one length, or the reason why there are none."""

    prompt: int
    batch: int
    implementation: str
    prompt_rate: float = NAN  # tokens a second until the first new one
    token_ms: float = NAN  # of each that follows, in every row of the batch
    rate: float = NAN  # following tokens a second, all rows of the batch
    spread: float = NAN  # the range of the rounds' token_ms over their median
    first_seconds: float = NAN  # of the first run, with compilation
    peak_bytes: int | None = None
    failure: str = ""


@dataclass
class _Stamps:
    """Takes the place of a streamer: when the host has the prompt, and each new token."""

    device: torch.device
    seconds: list[float] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        synchronize(self.device)
        self.seconds.append(time.perf_counter())

    def end(self) -> None:
        pass


def generated(model: nn.Module, ids: Tensor, new: int, way: Way, **options: Any) -> Tensor:
    """The new tokens `[B, new]`, the most probable ones."""
    choice = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    tokens: Tensor = model.generate(ids, **choice, **way.options, **options)  # type: ignore[operator]
    return tokens[:, ids.shape[1] :]


def drawn(model: nn.Module, batch: int, length: int) -> Tensor:
    """Prompts of random tokens."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, config.vocab_size, (batch, length), generator=generator).to(next(model.parameters()).device)


def same_tokens(model: nn.Module, ways: Sequence[Way]) -> dict[str, str]:
    """For each way, whether it gives the tokens of eager attention with a dynamic cache, or where they differ first.

    model: in fp32, in which rounding seldom decides which token is the most probable.
    """
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
    model: nn.Module, ways: Sequence[Way], prompt: int, batch: int, *, new: int, rounds: int, device: torch.device,
    late: Callable[[], bool], say: Callable[[str], None],
) -> list[Row]:  # fmt: skip
    """A row for each way, which take turns. new: tokens to generate, at least two."""
    rows = [Row(prompt, batch, str(way)) for way in ways]
    ids = drawn(model, batch, prompt)
    models: dict[str, nn.Module] = {}
    for row, way in zip(rows, ways):
        try:
            if way.implementation not in models:
                models[way.implementation] = with_attention(model, way.implementation)
        except Exception as failure:
            row.failure = reason(failure)
    seconds: dict[str, list[tuple[float, float]]] = {str(way): [] for way in ways}  # of prompt and token, of each round
    for number in range(rounds + 1):
        for row, way in zip(rows, ways):
            if row.failure:
                continue
            if late():
                row.failure = "" if seconds[str(way)] else "out of time"
                continue
            try:
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                begin = time.perf_counter()
                stamps = _Stamps(device)
                generated(models[way.implementation], ids, new, way, streamer=stamps)
                if number == 0:  # in which all is compiled
                    row.first_seconds = time.perf_counter() - begin
                    row.peak_bytes = peak_memory(device)
                    say(f"{prompt:,} x {batch}, {way}: first {row.first_seconds:.1f} s")
                    continue
                took = [after - before for before, after in pairwise(stamps.seconds)]
                seconds[str(way)].append((took[0], median(took[1:])))
            except Exception as failure:
                row.failure = reason(failure)
                say(f"{prompt:,} x {batch}, {way}: {row.failure}")
            release(device)
    for row, rounds_of in zip(rows, seconds.values()):
        if row.failure or not rounds_of:
            row.failure = row.failure or "out of time"
            continue
        of_prompt, of_token = (median(each) for each in zip(*rounds_of))
        row.prompt_rate, row.token_ms, row.rate = batch * prompt / of_prompt, of_token * 1e3, batch / of_token
        row.spread = (max(each for _, each in rounds_of) - min(each for _, each in rounds_of)) / of_token
    return rows

"""Tokens a second of a trained model that generates with a cache, after prompts that fill its context."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from experiments.lm.config import Config
from experiments.lm.data.store import Part
from experiments.lm.model.remembered import Layer, cast_weights, next_scores, put_row, remembered
from experiments.lm.model.transformer import LanguageModel
from experiments.training.clock import synchronize
from sparseflash.cli.pattern_text import parts
from sparseflash.nn import GraphedStep

WARM = 4  # tokens first, in which kernels are compiled and the step is recorded


class Speed(NamedTuple):
    """Seconds for one prompt, and for one token of each of `batch` sequences: the median, with its relative spread."""

    batch: int
    prompt: int
    prompt_seconds: float
    token_seconds: float
    spread: float
    tokens: list[list[int]]


def prompt_tokens(config: Config, tokens: int) -> int:
    """The length of a prompt: the context, or what new tokens leave of it, because learned positions end with it."""
    if config.positions != "learned":
        return config.context
    room = config.context - WARM
    if tokens >= room:
        raise ValueError(
            f"tokens must be less than {room:,}, because learned positions end with the context; got {tokens:,}"
        )
    return room - tokens


@torch.inference_mode()
def measured(model: LanguageModel, config: Config, part: Part, batch: int, prompt: int, tokens: int) -> Speed:
    """Prompts are passages of the text, and each next token is the likeliest one."""
    names = parts(config.pattern, ",")
    if prompt + WARM + tokens > len(part):
        raise ValueError(f"the text must have {prompt + WARM + tokens:,} tokens for a prompt; it has {len(part):,}")
    patterns = [names[layer % len(names)] for layer in range(config.depth)]
    device = model.embedding.weight.device

    def caches(sequences: int) -> list[Layer]:
        capacity = prompt + WARM + tokens
        return remembered(model, patterns, sequences, capacity, window=config.window, block=config.block)

    whole = caches(batch)
    firsts, seconds = [], []
    for row in range(batch):
        begin = row * (len(part) - prompt) // batch
        ids = torch.from_numpy(part.tokens[begin : begin + prompt].astype("int64")).to(device)[None]
        one = caches(1)
        synchronize(device)
        began = time.perf_counter()
        firsts.append(next_scores(model, ids, one).argmax(1))
        synchronize(device)
        seconds.append(time.perf_counter() - began)
        put_row(whole, row, one)
    step = GraphedStep(
        lambda ids: next_scores(model, ids, whole).argmax(1, keepdim=True), [layer.cache for layer in whole]
    )
    now, made, times = torch.stack(firsts), [torch.stack(firsts)], []
    for _ in range(WARM + tokens - 1):
        synchronize(device)
        began = time.perf_counter()
        now = step(now)
        synchronize(device)
        times.append(time.perf_counter() - began)
        made.append(now)
    timed = times[WARM - 1 :]
    middle = statistics.median(timed)
    spread = statistics.median(abs(each - middle) for each in timed) / middle
    return Speed(batch, prompt, min(seconds), middle, spread, torch.cat(made, 1).tolist())


def all_measured(
    model: LanguageModel, config: Config, part: Part, batches: Sequence[int], prompt: int, tokens: int,
    say: Callable[[str], None],
) -> list[Speed]:  # fmt: skip
    """Of a model that is used for nothing else afterwards."""
    cast_weights(model)
    found = []
    for batch in batches:
        each = measured(model, config, part, batch, prompt, tokens)
        found.append(each)
        say(
            f"{batch} x {prompt:,} tokens, {config.pattern}: {batch / each.token_seconds:,.0f} tokens/s, "
            f"{1000 * each.token_seconds:.2f} ms a token; prompt {prompt / each.prompt_seconds:,.0f} tokens/s"
        )
    return found

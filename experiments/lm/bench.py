"""Tokens/s, MFU and memory of whole training steps on random tokens, in bf16.

Rows of one model and context share weights, optimiser and compiled code, and take turns.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import torch

from experiments.lm import flops, patterns
from experiments.lm.cases import Case
from experiments.lm.config import Config, configure
from experiments.lm.model.attention import Attention, attention_over
from experiments.lm.model.chosen import Choosing
from experiments.lm.model.transformer import LanguageModel
from experiments.lm.steps import AccumulatingSteps, Batch, check_recordable
from experiments.training.clock import synchronize
from experiments.training.optimizer import adamw
from experiments.training.profiling import KernelCost, costs_of

LR = 1e-4
PROFILED_STEPS = 2

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """minutes: no row and no round starts after this time."""

    minutes: float = 5.0
    tokens: int = 65_536
    rounds: int = 3
    round_seconds: float = 0.6
    recorded: bool = False  # measure each case again with CUDA graphs
    profiled: bool = False  # list each row's kernels, in untimed steps
    chosen: dict[str, object] = field(default_factory=dict)  # replace the preset's


@dataclass
class Row:
    case: Case
    parameters: int = 0
    density: float = float("nan")  # live scores, mean of the layers
    batch: int = 0
    part: int = 0
    first_seconds: float = float("nan")  # with compilation
    peak_bytes: int = 0
    flops_a_token: float = float("nan")
    rounds: list[float] = field(default_factory=list)  # seconds of a step
    mfu: float | None = None
    kernels: list[KernelCost] = field(default_factory=list)
    failure: str = ""

    @property
    def seconds(self) -> float:
        return median(self.rounds) if self.rounds else float("nan")

    @property
    def tokens_per_s(self) -> float:
        return self.batch * self.case.context / self.seconds if self.rounds else float("nan")

    @property
    def spread(self) -> float:
        return (max(self.rounds) - min(self.rounds)) / self.seconds if self.rounds else float("nan")


def measure(cases: Sequence[Case], options: Options, device: torch.device, say: Say) -> list[Row]:
    deadline = time.monotonic() + 60 * options.minutes
    if options.recorded:
        check_recordable(device)
        cases = [case._replace(recorded=each) for case in cases for each in (False, True)]
    rows = [Row(case) for case in dict.fromkeys(cases)]
    for preset in dict.fromkeys(row.case.preset for row in rows):
        of_model = [row for row in rows if row.case.preset == preset]
        config = replace(configure(preset, dict(options.chosen)), context=max(row.case.context for row in of_model))
        torch._dynamo.reset()
        try:
            _measure_model(config, of_model, options, device, deadline, say)
        except torch.OutOfMemoryError:
            for row in of_model:
                row.failure = row.failure or ("" if row.rounds else "out of memory")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _measure_model(
    config: Config, rows: Sequence[Row], options: Options, device: torch.device, deadline: float, say: Say
) -> None:
    if time.monotonic() > deadline:
        _skip(rows)
        return
    torch.manual_seed(0)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    with device:
        model = LanguageModel(config.sizes, [], dtype=dtype, compiling=config.compiled, recompute=config.recompute)
    optimizer = adamw(model, config.lr, config.weight_decay, config.betas)
    for context in dict.fromkeys(row.case.context for row in rows):
        prepared = []
        part = max(1, config.micro_tokens // context)
        batch = max(1, options.tokens // context)
        part = min(part, batch)
        kinds = {
            recorded: AccumulatingSteps(model, optimizer, device, part=part, clip=config.clip, recorded=recorded)
            for recorded in dict.fromkeys(row.case.recorded for row in rows)
        }
        tokens = Batch(torch.randint(config.vocabulary, (batch, context + 1), device=device))
        for row in (row for row in rows if row.case.context == context):
            row.batch, row.part, row.parameters = batch, part, sum(p.numel() for p in model.parameters())
            if time.monotonic() > deadline:
                _skip([row])
                continue
            attentions = _prepare(row, model, config, device)
            if attentions is not None and _first(row, model, attentions, kinds[row.case.recorded], tokens, say):
                prepared.append((row, attentions))
        for _ in range(options.rounds):
            for row, attentions in prepared:
                if not row.failure and (time.monotonic() < deadline or not row.rounds):
                    _round(row, model, attentions, kinds[row.case.recorded], tokens, options.round_seconds)
        top = flops.peak(device)
        for row, _ in prepared:
            if row.rounds and top is not None and config.precision == "bf16":
                row.mfu = row.flops_a_token * row.tokens_per_s / top
        for row, attentions in prepared:
            if options.profiled and row.rounds and time.monotonic() < deadline:
                model.attentions = tuple(attentions)
                row.kernels = costs_of(partial(_step, kinds[row.case.recorded], tokens), PROFILED_STEPS, device)
        model.attentions = ()


def _step(steps: AccumulatingSteps, tokens: Batch, number: int) -> None:
    steps(tokens, LR)


def _skip(rows: Sequence[Row]) -> None:
    for row in rows:
        row.failure = "out of time"


def _prepare(row: Row, model: LanguageModel, config: Config, device: torch.device) -> list[Attention] | None:
    """One object for each mask; None if the implementation does not support the mask.

    Layers that choose blocks are apart from the model, whose optimizer does not know the few weights of their choice.
    """
    case, sizes = row.case, config.sizes
    masks = patterns.of_layers(
        case.pattern, sizes.depth, sizes.heads, case.context, window=config.window, block=config.block
    )
    row.density = sum(mask.density for mask in masks) / len(masks)
    live = flops.live_scores(masks, sizes.heads)
    row.flops_a_token = flops.of_token(sizes.weights, sizes.head_dim, live, case.context)
    made: dict[int, Attention] = {}
    try:
        for mask in masks:
            if id(mask) not in made:
                made[id(mask)] = attention_over(mask.to(device), case.attention)
    except (ValueError, torch.OutOfMemoryError) as error:
        row.failure = "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error)
        return None
    attentions = [model.made(made[id(mask)]) for mask in masks]
    return [each.to(device) if isinstance(each, Choosing) else each for each in attentions]


def _first(
    row: Row, model: LanguageModel, attentions: list[Attention], steps: AccumulatingSteps, batch: Batch, say: Say
) -> bool:
    begin = time.perf_counter()
    _run(row, model, attentions, steps, batch, count=1)
    row.first_seconds = time.perf_counter() - begin
    if not row.failure:
        _run(row, model, attentions, steps, batch, count=1)
    case = row.case
    found = row.failure or f"first step {row.first_seconds:.1f} s"
    say(f"{case.preset} {case.context:,} {case.pattern} {case.implementation}: {found}")
    return not row.failure


def _round(
    row: Row, model: LanguageModel, attentions: list[Attention], steps: AccumulatingSteps, batch: Batch, seconds: float
) -> None:
    once = _run(row, model, attentions, steps, batch, count=1)
    if row.failure:
        return
    count = max(1, min(20, round(seconds / once)))
    took = _run(row, model, attentions, steps, batch, count=count)
    if not row.failure:
        row.rounds.append(took / count)


def _run(
    row: Row, model: LanguageModel, attentions: list[Attention], steps: AccumulatingSteps, batch: Batch, count: int
) -> float:
    model.attentions = tuple(attentions)
    device = steps.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    synchronize(device)
    begin = time.perf_counter()
    try:
        for _ in range(count):
            steps(batch, LR)
        synchronize(device)
    except torch.OutOfMemoryError:
        row.failure = "out of memory"
    except Exception as error:
        row.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    took = time.perf_counter() - begin
    if row.failure:
        steps.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    elif on_gpu:
        row.peak_bytes = max(row.peak_bytes, torch.cuda.max_memory_allocated(device))
    return took

"""Time and memory of a training step with each implementation, in turns on one device."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from experiments.benchmarks import timing
from experiments.lra.config import Config
from experiments.lra.graph_steps import steps_of
from experiments.lra.losses import objective_of
from experiments.lra.model.build import build_model, build_optimizer, mask_of
from experiments.lra.table.check import Yardstick
from experiments.lra.table.shapes import REFERENCE, full_batch
from experiments.lra.tasks import TASKS
from experiments.training.steps import Steps

OK, WRONG, OUT_OF_MEMORY, FAILED, NOT_RUN = "ok", "WRONG", "out of memory", "FAILED", "not run"


@dataclass
class Row:
    task: str
    variant: str
    batch: int  # examples per step
    length: int  # tokens of an example's sequences, including [CLS]
    precision: str
    status: str = OK
    density: float | None = None  # of the mask
    ms: float | None = None  # median time of a step (forward, backward, optimiser) by the host's clock
    spread: float | None = None  # range of the rounds over the median
    tokens_per_s: float | None = None
    memory_gb: float | None = None  # 10^9 bytes: peak of a step launched by the host, including the model
    speedup: float | None = None  # standard attention's time divided by this variant's, with the same batch
    error: float | None = None  # error of logits and gradients divided by the allowed error; at most 1
    reason: str = ""


class Candidate:
    def __init__(self, config: Config, device: torch.device) -> None:
        self.config = config
        self.device = device
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        mask = mask_of(config)
        self.density = mask.density
        self.model = build_model(config, TASKS[config.task], mask.to(device))
        self.optimizer = build_optimizer(config, self.model)
        self.batch = full_batch(config, config.batch).to(device)
        self.steps = Steps(self.model, self.optimizer, objective_of(config, device), device)
        self.step()
        self.step()
        self.memory_gb: float | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.step()
            torch.cuda.synchronize(device)
            self.memory_gb = (torch.cuda.max_memory_allocated(device) - before) / 1e9

    def capture(self, pool: Any) -> None:
        self.steps = steps_of(self.model, self.optimizer, self.config, self.device, pool=pool)
        self.step()

    def step(self) -> None:
        """A training step with learning rate 0: the same work without changing weights."""
        self.steps(self.batch, 0.0)


def measure(
    configs: dict[str, Config],
    device: torch.device,
    *,
    rounds: int,
    steps: int,
    say: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """The rows of one task, from the settings of each variant.

    If standard attention runs out of memory, everything is measured again with half the batch; the rows of both are
    kept.
    """
    found: list[Row] = []
    verdicts = checked(configs, device, say)
    while True:
        rows = at_one_batch(configs, verdicts, device, rounds, steps, say)
        found += rows
        short = any(row.variant == REFERENCE and row.status == OUT_OF_MEMORY for row in rows)
        half = rows[0].batch // 2
        if not short or half == 0:
            return found
        say(f"{rows[0].task}: standard attention does not fit; again with a batch of {half}")
        configs = {variant: replace(config, batch=half) for variant, config in configs.items()}


def checked(configs: dict[str, Config], device: torch.device, say: Callable[[str], None]) -> dict[str, Row]:
    yardstick, rows = Yardstick(device), {}
    for variant, config in configs.items():
        row = rows[variant] = new_row(variant, config)
        with caught(row, device):
            row.error = yardstick.error_of(config)
            if not row.error <= 1:
                row.status, row.reason = WRONG, "logits and gradients differ from fp64 by more than rounding explains"
        if row.status == OUT_OF_MEMORY:  # the check ran out of memory, so a smaller batch would not help
            row.status, row.reason = FAILED, f"not checked: {row.reason}"
        say(f"{config.task} {variant}: error {'-' if row.error is None else f'{row.error:.2f}'} of 1 {row.reason}")
    return rows


def at_one_batch(
    configs: dict[str, Config],
    verdicts: dict[str, Row],
    device: torch.device,
    rounds: int,
    steps: int,
    say: Callable[[str], None],
) -> list[Row]:
    candidates: dict[str, Candidate] = {}
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    rows = {variant: replace(verdicts[variant], batch=config.batch) for variant, config in configs.items()}
    for variant, row in rows.items():
        if row.status == OK:
            with caught(row, device):
                candidates[variant] = Candidate(configs[variant], device)
    # Only after all have run alone, because a graph keeps its memory. The largest comes first, so that the others fit.
    for variant in sorted(candidates, key=lambda variant: -(candidates[variant].memory_gb or 0.0)):
        with caught(rows[variant], device):
            candidates[variant].capture(pool)
        if rows[variant].status != OK:
            rows[variant].reason = f"capturing it beside the others: {rows[variant].reason}"
            del candidates[variant]
    calls = {
        variant: timing.Timed(candidate.step, partial(fresh_memory, device))
        for variant, candidate in candidates.items()
    }
    timings = timing.of_single_calls(calls, device, rounds=rounds, count=steps)
    for variant, candidate in candidates.items():
        row, timed = rows[variant], timings[variant]
        row.density, row.memory_gb = candidate.density, candidate.memory_gb
        if timed.failure is not None:
            row.status, row.reason = verdict(timed.failure)
            timed.failure = None  # its traceback keeps the step's memory alive
            continue
        row.ms, row.spread = timed.ms, timed.spread
        row.tokens_per_s = candidate.batch.live_tokens / timed.ms * 1e3
    reference = rows[REFERENCE].ms if REFERENCE in rows else None
    for row in rows.values():
        if row.ms is not None and reference is not None:
            row.speedup = reference / row.ms
        time = row.status if row.ms is None else f"{row.ms:.2f} ms a step"
        more = "" if row.speedup is None else f", {row.speedup:.2f} times standard's speed"
        say(f"{row.task} {row.variant}, batch {row.batch}: {time}{more} {row.reason}")
    return list(rows.values())


def new_row(variant: str, config: Config) -> Row:
    length = config.shape.max_tokens + config.shape.first
    return Row(config.task, variant, config.batch, length, config.precision)


@contextmanager
def caught(row: Row, device: torch.device) -> Iterator[None]:
    try:
        yield
    except Exception as failure:
        row.status, row.reason = verdict(failure)
    if row.status not in (OK, WRONG):
        gc.collect()
    with fresh_memory(device):
        pass


def verdict(failure: Exception) -> tuple[str, str]:
    first = next((line.strip() for line in str(failure).splitlines() if line.strip()), "")
    if isinstance(failure, torch.OutOfMemoryError) or isinstance(failure.__context__, torch.OutOfMemoryError):
        # "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which ..."
        return OUT_OF_MEMORY, re.sub(r" of which.*", "", first)[:200]
    return FAILED, f"{type(failure).__name__}: {first}"[:200]


@contextmanager
def fresh_memory(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.empty_cache()
    yield

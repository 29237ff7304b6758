"""Exactness and speed of one model with each attention implementation; what cannot run is a row with its reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from experiments.benchmarks.huggingface.exactness import Yardstick, worst
from experiments.benchmarks.huggingface.implementations import OURS, reason, release, with_attention
from experiments.benchmarks.huggingface.shapes import Shape
from experiments.benchmarks.timing import Timed, Timing, first_call, in_turns
from experiments.training.environment import peak_memory

EXACT, FORWARD, STEP = "exactness", "forward", "training step"
CHECKED_TOKENS, CHECKED_BATCH = 150, 2
NAN = float("nan")


@dataclass
class Row:
    """One number of one model with one implementation, or the reason why there is none."""

    model: str
    implementation: str
    what: str  # EXACT, FORWARD or STEP
    value: float = NAN  # the largest error over what is allowed, or tokens or images a second
    ms: float = NAN
    spread: float = NAN
    peak_bytes: int | None = None
    first_seconds: float = NAN  # of the first call, with compilation
    note: str = ""  # of EXACT: which result has the largest error
    failure: str = ""


@dataclass(frozen=True)
class Options:
    """How to measure. tokens, batch: None for the shape's own. deadline: by time.monotonic(); nothing begins after."""

    tokens: int | None = None
    batch: int | None = None
    compiles: bool = False
    small: bool = False
    rounds: int = 3
    round_ms: float = 300.0
    deadline: float = float("inf")

    def late(self) -> bool:
        return time.monotonic() > self.deadline


Say = Callable[[str], None]


def exactness(
    shape: Shape, names: Sequence[str], options: Options, device: torch.device, dtype: torch.dtype
) -> Iterator[Row]:
    """The largest error of logits and gradients over what is allowed, for each implementation but "eager"."""

    def row(name: str, **values: object) -> Row:
        return Row(shape.name, name, EXACT, **values)  # type: ignore[arg-type]

    others = [name for name in names if name != "eager"]
    tokens = min(CHECKED_TOKENS, options.tokens or CHECKED_TOKENS)
    try:
        model = shape.made(dtype, device, tokens=tokens, small=options.small, check=True)
        yardstick = Yardstick.of(
            model, lambda seed: shape.inputs(model, device, tokens=tokens, batch=CHECKED_BATCH, seed=seed)
        )
    except Exception as failure:
        yield from (row(name, failure=f"eager: {reason(failure)}") for name in others)
        return
    for name in others:
        if name in shape.without or options.late():
            yield row(name, failure=shape.without.get(name, "out of time"))
            continue
        try:
            what, ratio = worst(yardstick.compare(with_attention(model, name)))
            yield row(name, value=ratio, note=what)
        except Exception as failure:
            yield row(name, failure=reason(failure))


def speed(
    shape: Shape, names: Sequence[str], options: Options, device: torch.device, dtype: torch.dtype, say: Say
) -> list[Row]:
    """Tokens or images a second of a forward pass and of a training step, implementations in turns."""
    tokens, batch = options.tokens or shape.tokens, options.batch or shape.batch
    rows = [Row(shape.name, name, what) for name in names for what in (FORWARD, STEP)]
    try:
        model = shape.made(dtype, device, tokens=tokens, small=options.small, check=False)
        inputs = shape.inputs(model, device, tokens=tokens, batch=batch)
    except Exception as failure:
        for row in rows:
            row.failure = reason(failure)
        return rows
    calls: dict[str, Timed] = {}
    models: dict[str, nn.Module | str] = {}  # or why there is none
    for row in rows:
        if row.implementation not in models:
            refused = shape.without.get(row.implementation)
            models[row.implementation] = refused or _prepared(model, row.implementation, options.compiles)
        made = models[row.implementation]
        if isinstance(made, str) or options.late():
            row.failure = made if isinstance(made, str) else "out of time"
            continue
        call = _forward(made, inputs) if row.what == FORWARD else _training_step(made, inputs)
        _first_calls(row, call, model, device)
        say(f"{row.model}, {row.implementation}, {row.what}: {row.failure or f'first {row.first_seconds:.1f} s'}")
        if not row.failure:
            calls[f"{row.implementation}, {row.what}"] = Timed(call, nullcontext)
    timings = in_turns(calls, device, rounds=options.rounds, round_ms=options.round_ms)
    for row in rows:
        timing = timings.get(f"{row.implementation}, {row.what}")
        if timing is not None:
            _fill(row, timing, shape.count(inputs))
    return rows


def _prepared(model: nn.Module, name: str, compiles: bool) -> nn.Module | str:
    try:
        made = with_attention(model, name)
    except Exception as failure:
        return reason(failure)
    return torch.compile(made) if compiles else made  # type: ignore[return-value]


def _forward(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Callable[[], object]:
    # Without labels, but those of an encoder-decoder are also what its decoder reads.
    is_pair = model.config.is_encoder_decoder  # type: ignore[union-attr]
    given = {name: each for name, each in inputs.items() if name != "labels"}
    if is_pair:
        given["decoder_input_ids"] = inputs["labels"]

    @torch.no_grad()
    def forward() -> object:
        return model(**given).logits

    return forward


def _training_step(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Callable[[], object]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**inputs).loss.backward()

    return step


def _first_calls(row: Row, call: Callable[[], object], weights: nn.Module, device: torch.device) -> None:
    """Two calls: in the first all is compiled, of the second the memory is noted."""
    try:
        row.first_seconds, _ = first_call(call, device)
        weights.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        first_call(call, device)
        row.peak_bytes = peak_memory(device)
    except Exception as failure:
        row.failure = reason(failure)
    weights.zero_grad(set_to_none=True)  # which a failed step may have left; all models share them
    release(device)


def _fill(row: Row, timing: Timing, count: int) -> None:
    if timing.failure is not None:
        row.failure = reason(timing.failure)
        return
    row.ms, row.spread, row.value = timing.ms, timing.spread, count / timing.ms * 1e3


def measure(
    shape: Shape, names: Sequence[str], options: Options, device: torch.device, dtype: torch.dtype, say: Say
) -> list[Row]:
    """All rows of a model: exactness first, then speed."""
    if options.late():
        return [Row(shape.name, name, what, failure="out of time") for name in names for what in (EXACT, FORWARD, STEP)]
    import torch._dynamo

    torch._dynamo.reset()  # graphs of other models
    # Each implementation has graphs of its own of the same code, and FlexAttention compiles itself for each layout.
    # Past the default limits nothing would be compiled, with no more than a warning.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 2048
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    rows = []
    for row in exactness(shape, names, options, device, dtype):
        say(f"{row.model}, {row.implementation}: {row.failure or f'largest error {row.value:.2f} of what is allowed'}")
        rows.append(row)
    release(device)
    rows += speed(shape, names, options, device, dtype, say)
    release(device)
    return rows


def inexact(rows: Sequence[Row]) -> list[str]:
    """The models for which this library's attention gave something else."""
    return [row.model for row in rows if row.what == EXACT and row.implementation == OURS and row.value > 1.0]

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from experiments.benchmarks.harness import Bench, Way, reason
from experiments.benchmarks.huggingface.exactness import Yardstick, worst
from experiments.benchmarks.huggingface.implementations import OURS, recorded_as, release, with_attention
from experiments.benchmarks.huggingface.shapes import Shape
from experiments.benchmarks.timing import first_call
from experiments.measurements import Measurement
from experiments.training.environment import peak_memory

ERROR, FORWARD, STEP = "exactness", "forward", "training-step"
CHECKED_TOKENS, CHECKED_BATCH = 150, 2
GIB = 2**30
ALLOWED = "of what is allowed"


@dataclass(frozen=True)
class Options:
    """tokens, batch: None for the shape's own. late: nothing begins once it is true."""

    tokens: int | None = None
    batch: int | None = None
    compiles: bool = False
    small: bool = False
    late: Callable[[], bool] = lambda: False


def exactness(bench: Bench, shape: Shape, names: Sequence[str], options: Options, dtype: torch.dtype) -> None:
    failures: dict[str, str] = {}
    tokens = min(CHECKED_TOKENS, options.tokens or CHECKED_TOKENS)
    try:
        model = shape.made(dtype, bench.device, tokens=tokens, small=options.small, check=True)
        yardstick = Yardstick.of(
            model, lambda seed: shape.inputs(model, bench.device, tokens=tokens, batch=CHECKED_BATCH, seed=seed)
        )
    except Exception as failure:
        failures = dict.fromkeys(names, f"eager: {reason(failure)}")
    for name in (name for name in names if name != "eager"):
        path = f"{shape.name}/{ERROR}/{recorded_as(name)}"
        failed = failures.get(name) or shape.without.get(name) or ("out of time" if options.late() else "")
        if not failed:
            try:
                what, ratio = worst(yardstick.compare(with_attention(model, name)))
                bench.add(path, ratio, ALLOWED, largest=what)
            except Exception as failure:
                failed = reason(failure)
        if failed:
            bench.add(path, None, ALLOWED, failure=failed)


def speed(bench: Bench, shape: Shape, names: Sequence[str], options: Options, dtype: torch.dtype) -> None:
    tokens, batch = options.tokens or shape.tokens, options.batch or shape.batch
    models: dict[str, nn.Module | str] = {}  # or the reason why it is missing
    ways: dict[str, Way] = {}
    try:
        model = shape.made(dtype, bench.device, tokens=tokens, small=options.small, check=False)
        inputs = shape.inputs(model, bench.device, tokens=tokens, batch=batch)
    except Exception as failure:
        models = dict.fromkeys(names, reason(failure))
    for name in names:
        if name not in models:
            models[name] = shape.without.get(name) or _prepared(model, name, options.compiles)
        made = models[name]
        for what, call_of in ((FORWARD, _forward), (STEP, _training_step)):
            failed = made if isinstance(made, str) else "out of time" if options.late() else ""
            if not failed and not isinstance(made, str):
                call = call_of(made, inputs)
                failed = _first_calls(bench, f"{shape.name}/{{}}-{what}/{recorded_as(name)}", call, model)
            if failed:
                bench.add(f"{shape.name}/{what}/{recorded_as(name)}", None, "ms", failure=failed)
            else:
                settings = {"items": shape.count(inputs), "of": shape.unit, "batch": batch, "tokens": tokens}
                ways[f"{what}/{recorded_as(name)}"] = Way(call, settings=settings, peer=True)
    bench.time(shape.name, ways)


def _prepared(model: nn.Module, name: str, compiles: bool) -> nn.Module | str:
    try:
        made = with_attention(model, name)
    except Exception as failure:
        return reason(failure)
    return torch.compile(made) if compiles else made  # type: ignore[return-value]


def _forward(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Callable[[], object]:
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


def _first_calls(bench: Bench, path: str, call: Callable[[], object], weights: nn.Module) -> str:
    failed = ""
    try:
        seconds, _ = first_call(call, bench.device)
        weights.zero_grad(set_to_none=True)
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(bench.device)
        first_call(call, bench.device)
        bench.add(path.format("first"), seconds, "s")
        if (peak := peak_memory(bench.device)) is not None:
            bench.add(path.format("peak"), peak / GIB, "GiB")
    except Exception as failure:
        failed = reason(failure)
    weights.zero_grad(set_to_none=True)
    release(bench.device)
    return failed


def measure(bench: Bench, shape: Shape, names: Sequence[str], options: Options, dtype: torch.dtype) -> None:
    import torch._dynamo

    torch._dynamo.reset()
    # Each implementation compiles graphs of its own. Past the limits PyTorch would only warn.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 2048
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for part in (exactness, speed):
        part(bench, shape, names, options, dtype)
        release(bench.device)


def inexact(measurements: Sequence[Measurement]) -> list[str]:
    ours = [each for each in measurements if each.name.endswith(f"/{ERROR}/{OURS}")]
    return [each.name.split("/")[1] for each in ours if each.value is not None and not each.value <= 1.0]

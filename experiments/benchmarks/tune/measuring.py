"""Times candidates on a GPU, in turns with the configuration that is shipped, over masks of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import geometric_mean
from typing import NamedTuple
from unittest import mock

import torch

from experiments.benchmarks import timing
from experiments.benchmarks.speed import check
from experiments.benchmarks.speed.patterns import block_mask, pattern
from experiments.benchmarks.speed.peers.runner import Inputs
from experiments.benchmarks.speed.precision import products_in_tf32
from experiments.benchmarks.tune.kernel_call import fresh_problem, kernel_call
from experiments.benchmarks.tune.space import Target
from sparseflash import attention
from sparseflash.backends.triton import configs, launch
from sparseflash.backends.triton.configs import Config

KINDS = ("dense", "causal", "butterfly", "local", "bigbird", "random12")
SHIPPED = "shipped"
_CHANNELS = 2048  # of all heads together


class Measured(NamedTuple):
    """A candidate's time over that of the shipped configuration, below 1 it is faster: by mask, and the mean."""

    config: Config
    ratios: dict[str, float]
    mean: float


class Bench:
    """Inputs and masks of one target, and its kernel as a call."""

    def __init__(self, target: Target, length: int, device: torch.device, kinds: Sequence[str] = KINDS) -> None:
        self.target, self.length, self.device = target, length, device
        self.heads = max(1, _CHANNELS // target.dim) if device.type == "cuda" else 1
        self.dtype = torch.bfloat16 if target.arithmetic == "half" else torch.float32
        if device.type == "cpu" and self.dtype == torch.bfloat16:
            self.dtype = torch.float16  # the interpreter has no bf16
        self.block = 128 if length >= 1024 else 32
        self.patterns = {kind: pattern(kind, length, self.block).to(device) for kind in kinds}
        self.masks = {kind: block_mask(kind, length, self.block).to(device) for kind in kinds}
        generator = torch.Generator(device).manual_seed(0)
        shape = (1, self.heads, length, target.dim)
        self.q, self.k, self.v, self.dout = (
            torch.randn(shape, generator=generator, device=device, dtype=self.dtype) for _ in range(4)
        )

    def ratios(
        self, candidates: Sequence[Config], *, rounds: int, round_ms: float, progress: Callable[[int], None]
    ) -> list[Measured]:
        """All candidates' times, fastest first; one that cannot run is left out."""
        times: dict[Config, dict[str, float]] = {config: {} for config in candidates}
        for number, kind in enumerate(self.masks, start=1):
            calls = {SHIPPED: timing.Timed(self.kernel(kind, None), nullcontext)}
            for config in candidates:
                calls[repr(config)] = timing.Timed(self.kernel(kind, config), nullcontext)
            found = timing.in_turns(calls, self.device, rounds=rounds, round_ms=round_ms)
            if found[SHIPPED].failure is not None:
                raise RuntimeError(f"the shipped configuration fails on {kind}") from found[SHIPPED].failure
            for config in candidates:
                measured = found[repr(config)]
                if measured.failure is None:
                    times[config][kind] = measured.ms / found[SHIPPED].ms
            progress(number)
        whole = [
            Measured(config, ratios, geometric_mean(ratios.values()))
            for config, ratios in times.items()
            if len(ratios) == len(self.masks)
        ]
        return sorted(whole, key=lambda each: each.mean)

    def kernel(self, kind: str, config: Config | None) -> Callable[[], object]:
        """The target's kernel under a mask, with a configuration, or with the shipped one, as a call."""
        problem = fresh_problem(self.masks[kind], self.q, tf32=self.target.arithmetic == "tf32")
        shipped = chosen(self.target, None)
        call = kernel_call(self.target.kernel, problem, self.q, self.k, self.v, self.dout, shipped)

        def configured() -> None:
            with chosen(self.target, config):
                call.run()

        return configured

    def error(self, config: Config, heads: int = 1) -> float:
        """The largest error of forward and gradients with this configuration, in units of the yardstick."""
        worst = 0.0
        for kind in self.masks:
            fresh = block_mask(kind, self.length, self.block).to(self.device)  # without launches from before
            q, k, v = (x.clone().requires_grad_() for x in (self.q, self.k, self.v))
            with chosen(self.target, config), products_in_tf32(self.target.arithmetic == "tf32"):
                out = attention(q, k, v, fresh, backend="triton")
                gradients = torch.autograd.grad(out, (q, k, v), self.dout)
            results = dict(zip(check.NAMES, (out.detach(), *gradients), strict=True))
            inputs = Inputs(q, k, v, self.dout)
            with products_in_tf32(self.target.arithmetic == "tf32"):
                pairs = check.checked_heads(1, self.heads, heads)
                worst = max(worst, *check.error_ratios(results, inputs, self.patterns[kind], pairs).values())
        return worst


@contextmanager
def chosen(target: Target, config: Config | None) -> Iterator[None]:
    """The target's kernel runs with this configuration, by descriptors or by pointers as the target says."""
    shipped = configs.config_for

    def pick(kernel: str, *asked: object) -> Config:
        return config if config is not None and kernel == target.kernel else shipped(kernel, *asked)  # type: ignore[arg-type]

    limit = 0 if target.descriptors else 1 << 62
    with (
        mock.patch.object(launch, "config_for", pick),
        mock.patch.object(launch, "_PRODUCTS_FOR_DESCRIPTORS", limit),
    ):
        yield

"""Times candidates on a GPU, in turns with the shipped configuration, under masks of several kinds.

A forward is timed whole, and so is a backward, whose other kernel keeps its shipped configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from statistics import geometric_mean
from typing import NamedTuple

import torch

from experiments.benchmarks import timing
from experiments.benchmarks.speed.patterns import block_mask
from experiments.benchmarks.speed.precision import products_in_tf32
from experiments.benchmarks.tune.space import Target
from sparseflash import attention, testing
from sparseflash.backends.triton.configs import Config
from sparseflash.backends.triton.overrides import override

KINDS = ("dense", "causal", "butterfly", "local", "bigbird", "random12")
_CHANNELS = 2048  # all heads together


class Measured(NamedTuple):
    """The time relative to the shipped configuration, by mask and as the mean."""

    config: Config
    ratios: dict[str, float]
    mean: float


class Candidates:
    def __init__(self, target: Target, length: int, device: torch.device, kinds: Sequence[str] = KINDS) -> None:
        self.target, self.length, self.device = target, length, device
        self.heads = max(1, _CHANNELS // target.dim) if device.type == "cuda" else 1
        self.dtype = torch.bfloat16 if target.arithmetic == "half" else torch.float32
        if device.type == "cpu" and self.dtype == torch.bfloat16:
            self.dtype = torch.float16  # the interpreter has no bf16
        self.block = 128 if length >= 1024 else 32
        self.masks = {kind: block_mask(kind, length, self.block).to(device) for kind in kinds}
        generator = torch.Generator(device).manual_seed(0)
        shape = (1, self.heads, length, target.dim)
        *self.leaves, self.dout = (
            torch.randn(shape, generator=generator, device=device, dtype=self.dtype) for _ in range(4)
        )
        for leaf in self.leaves:
            leaf.requires_grad_()

    def ratios(
        self, candidates: Sequence[Config], *, rounds: int, round_ms: float, progress: Callable[[int], None]
    ) -> list[Measured]:
        """Fastest first, without candidates that cannot run."""
        times: dict[Config, dict[str, float]] = {config: {} for config in candidates}
        for number, kind in enumerate(self.masks, start=1):
            calls = {None: self.timed(kind, None)}
            for config in candidates:
                with suppress(RuntimeError, ValueError):  # it cannot run
                    calls[config] = self.timed(kind, config)
            named = {repr(config): timed for config, timed in calls.items()}
            found = timing.in_turns(named, self.device, rounds=rounds, round_ms=round_ms)
            shipped = found[repr(None)]
            if shipped.failure is not None:
                raise RuntimeError(f"the shipped configuration fails on {kind}") from shipped.failure
            for config in candidates:
                measured = found.get(repr(config))
                if measured is not None and measured.failure is None:
                    times[config][kind] = measured.ms / shipped.ms
            progress(number)
        whole = [
            Measured(config, ratios, geometric_mean(ratios.values()))
            for config, ratios in times.items()
            if len(ratios) == len(self.masks)
        ]
        return sorted(whole, key=lambda each: each.mean)

    def timed(self, kind: str, config: Config | None) -> timing.Timed:
        """The target's pass. Its kernels are prepared again in every turn, before it is timed."""
        attend = partial(attention, *self.leaves, self.masks[kind], backend="triton")
        with chosen(self.target, config):
            if self.target.kernel == "forward":
                call = torch.no_grad()(attend)
            else:
                call = partial(torch.autograd.grad, attend(), self.leaves, self.dout, retain_graph=True)
        return timing.Timed(call, partial(chosen, self.target, config))

    def error(self, config: Config, heads: int = 1) -> float:
        """The largest error of the forward and the gradients in units of the allowed error."""
        worst = 0.0
        with chosen(self.target, config):
            for mask in self.masks.values():
                found = testing.compare(
                    partial(attention, mask=mask, backend="triton"), *self.leaves, mask, dout=self.dout, heads=heads,
                    every_draw=False,
                )  # fmt: skip
                worst = max(worst, found.worst)
        return worst


@contextmanager
def chosen(target: Target, config: Config | None) -> Iterator[None]:
    """Inside, launches use this configuration, None for the shipped one, with the target's loads and arithmetic."""
    configs = {} if config is None else {target.kernel: config}
    with override(configs=configs, descriptors=target.descriptors), products_in_tf32(target.arithmetic == "tf32"):
        yield

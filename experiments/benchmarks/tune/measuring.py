"""Times candidates on a GPU, in turns with the shipped configuration, under masks of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import geometric_mean
from typing import NamedTuple

import torch

from experiments.benchmarks import timing
from experiments.benchmarks.speed.patterns import block_mask
from experiments.benchmarks.speed.precision import products_in_tf32
from experiments.benchmarks.tune.kernel_call import KernelOfAttention
from experiments.benchmarks.tune.space import Target
from sparseflash import attention, testing
from sparseflash.backends.triton.configs import Config
from sparseflash.backends.triton.overrides import override

KINDS = ("dense", "causal", "butterfly", "local", "bigbird", "random12")
SHIPPED = "shipped"
_CHANNELS = 2048  # all heads together


class Measured(NamedTuple):
    """A candidate's time relative to the shipped configuration, by mask and as the mean; below 1 it is faster."""

    config: Config
    ratios: dict[str, float]
    mean: float


class Candidates:
    """The inputs and masks of one target, and its kernel as a call."""

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
        self.q, self.k, self.v, self.dout = (
            torch.randn(shape, generator=generator, device=device, dtype=self.dtype) for _ in range(4)
        )

    def ratios(
        self, candidates: Sequence[Config], *, rounds: int, round_ms: float, progress: Callable[[int], None]
    ) -> list[Measured]:
        """The times of all candidates, fastest first, without those that cannot run."""
        times: dict[Config, dict[str, float]] = {config: {} for config in candidates}
        for number, kind in enumerate(self.masks, start=1):
            named = {SHIPPED: None, **{repr(config): config for config in candidates}}
            kernel = self.kernel(kind)
            calls = {}
            for name, config in named.items():
                with chosen(self.target, config):
                    calls[name] = timing.Timed(kernel.call().run, nullcontext)
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

    def kernel(self, kind: str) -> KernelOfAttention:
        """The target's kernel under a mask."""
        with chosen(self.target, None):
            return KernelOfAttention(
                self.target.kernel, self.masks[kind], self.q, self.k, self.v, self.dout,
                tf32=self.target.arithmetic == "tf32",
            )  # fmt: skip

    def error(self, config: Config, heads: int = 1) -> float:
        """The largest error of the forward and the gradients with this configuration, in units of the allowed error."""
        worst = 0.0
        with chosen(self.target, config), products_in_tf32(self.target.arithmetic == "tf32"):
            for mask in self.masks.values():
                found = testing.compare(
                    partial(attention, mask=mask, backend="triton"), self.q, self.k, self.v, mask, dout=self.dout,
                    heads=heads, every_draw=False,
                )  # fmt: skip
                worst = max(worst, found.worst)
        return worst


def chosen(target: Target, config: Config | None) -> AbstractContextManager[None]:
    """Inside the context, launches are prepared with this configuration for the target's kernel, and with the target's
    loads.

    config: None for the shipped one.
    """
    return override(configs={} if config is None else {target.kernel: config}, descriptors=target.descriptors)

"""Times the three kernels under one mask, each in several tilings, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, get_args
from unittest import mock

import torch

from experiments.benchmarks import timing
from experiments.benchmarks.speed.patterns import block_mask, pattern
from experiments.benchmarks.tune.kernel_call import fresh_problem, kernel_call
from sparseflash.backends.triton import launch
from sparseflash.backends.triton.configs import Config, Kernel, arithmetic_of, config_for, held_first
from sparseflash.backends.triton.schedule.retiling import Retiled
from sparseflash.backends.triton.schedule.tilings import HALF, Tiling

KINDS = ("butterfly", "local", "bigbird", "random12")
BLOCKS = (128, 64, 32, 16)
KERNELS: tuple[Kernel, ...] = ("forward", "dq", "dk_dv")
OWN, CHOSEN = "own", "chosen"
TARGETS = {128: 1.0, 64: 0.85, 32: 0.6, 16: 0.4}  # of the speed per live score of blocks of 128
_CHANNELS = 2048  # of all heads together


@dataclass(frozen=True)
class Measured:
    """One kernel under one mask in one tiling."""

    kind: str
    block: int  # tokens
    dim: int
    kernel: str
    way: str  # OWN, CHOSEN, a tiling, or a configuration
    tiling: Tiling
    config: Config
    length: int  # tokens
    kept: int  # live scores of a head
    tiles: int  # of the lists of the tiling, of a head
    predicted: float  # the cost for a head, in products of 64 x 64 scores
    ms: float
    difference: float  # of the results from those in the mask's own tiles, relative to the largest


class Bench:
    """Inputs of one head dim, 2048 channels in all, in bf16; in fp16 on a CPU, whose interpreter has no bf16."""

    def __init__(self, dim: int, length: int, device: torch.device) -> None:
        self.dim, self.length, self.device = dim, length, device
        is_cpu = device.type == "cpu"
        self.heads = 1 if is_cpu else _CHANNELS // dim
        generator = torch.Generator(device).manual_seed(0)
        shape, dtype = (1, self.heads, length, dim), torch.float16 if is_cpu else torch.bfloat16
        self.q, self.k, self.v, self.dout = (
            torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4)
        )

    def measure(
        self, kind: str, block: int, *, every: bool = False, configs: Sequence[Config] = (),
        kernels: Sequence[Kernel] = KERNELS, rounds: int = 2, round_ms: float = 15.0,
    ) -> list[Measured]:  # fmt: skip
        """The kernels in the tiles of the mask and in those that the plan chooses.

        If `every`, in all others that it had to choose from, too; and with each of `configs`, in what the plan chooses
        then. Raises RuntimeError where a kernel fails.
        """
        found = []
        for kernel in kernels:
            calls = {OWN: self._call(kind, block, kernel, None), CHOSEN: self._call(kind, block, kernel, CHOSEN)}
            for tiling in self._others(kind, block, kernel, calls[CHOSEN].tiling) if every else ():
                calls["x".join(map(str, tiling))] = self._call(kind, block, kernel, tiling)
            for config in configs:
                with configured(config):
                    calls[f"with {config}"] = self._call(kind, block, kernel, CHOSEN)
            timed = {way: timing.Timed(call.run, nullcontext) for way, call in calls.items()}
            times = timing.in_turns(timed, self.device, rounds=rounds, round_ms=round_ms)
            for way, call in calls.items():
                if times[way].failure is not None:
                    raise RuntimeError(f"{kernel}, {kind} in blocks of {block}, {way}") from times[way].failure
                found.append(
                    Measured(
                        kind, block, self.dim, kernel, way, call.tiling, call.config,
                        self.length, pattern(kind, self.length, block).kept, call.tiles, call.predicted, times[way].ms,
                        _difference(call.results, calls[OWN].results),
                    )
                )  # fmt: skip
        return found

    def _problem(self, kind: str, block: int) -> launch.Problem:
        return fresh_problem(block_mask(kind, self.length, block).to(self.device), self.q, tf32=False)

    def _others(self, kind: str, block: int, kernel: Kernel, chosen: Tiling) -> list[Tiling]:
        retiled = self._problem(kind, block).plan._retiled
        assert retiled is not None
        found = retiled.candidates(int(kernel == "dk_dv"), *self._tiles(kernel))
        return [tiling for tiling in found[1:] if tiling != chosen]

    def _tiles(self, kernel: Kernel) -> list[tuple[int, int]]:
        """The tiles that the kernel would take, `(held, streamed)`: in one piece, and gathered."""
        capability = launch.capability_of(self.device)
        arithmetic = arithmetic_of(self.q.dtype, False)
        configs = [config_for(kernel, capability, arithmetic, self.dim, (256, 256), way) for way in (True, False)]
        return [held_first(kernel, config[:2]) for config in configs]

    def _call(self, kind: str, block: int, kernel: Kernel, tiling: Tiling | str | None) -> _Call:
        problem = self._problem(kind, block)
        call = kernel_call(kernel, problem, self.q, self.k, self.v, self.dout, shipped())
        with taking(tiling):
            call.run()  # prepares, and compiles
        (prepared,) = problem.plan.launches.values()
        retiled = problem.plan._retiled
        assert retiled is not None
        config = prepared.config
        tile = held_first(kernel, config[:2])
        tiles = retiled.count(int(kernel == "dk_dv"), prepared.tiling)
        predicted = HALF.of_tiles(tiles, prepared.tiling, tile, self.length, config.num_warps)
        return _Call(call.run, prepared.tiling, config, tiles, predicted, call.results)


@dataclass(frozen=True)
class _Call:
    run: Callable[[], None]
    tiling: Tiling
    config: Config
    tiles: int
    predicted: float
    results: list[torch.Tensor]


def _difference(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    pairs = zip(got, want, strict=True)
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)


@contextmanager
def configured(config: Config) -> Iterator[None]:
    """Launches prepared inside take that configuration, cut down to the tiles of the lists."""

    def pick(
        kernel: Kernel, capability: object, arithmetic: object, dim: int, block: tuple[int, int], way: bool
    ) -> Config:
        return Config(min(config[0], block[0]), min(config[1], block[1]), *config[2:])

    with mock.patch.object(launch, "config_for", pick):
        yield


@contextmanager
def shipped() -> Iterator[None]:
    """Launches prepared inside take what is shipped, also inside `configured`, in the cheapest tiling."""
    with mock.patch.object(launch, "config_for", config_for), taking(CHOSEN):
        yield


@contextmanager
def taking(tiling: Tiling | str | None) -> Iterator[None]:
    """Launches prepared inside take that tiling, CHOSEN: the cheapest, None: that of the mask."""

    def pick(self: Retiled, *asked: Any) -> Tiling:
        return self.candidates(*asked[:3])[0] if tiling is None else tiling  # type: ignore[return-value]

    with mock.patch.object(launch, "_PRODUCTS_FOR_TILINGS", 0):
        if tiling == CHOSEN:
            yield
        else:
            with mock.patch.object(Retiled, "tiling", pick):
                yield


assert set(KERNELS) == set(get_args(Kernel))

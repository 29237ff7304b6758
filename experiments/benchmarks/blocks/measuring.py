"""The three kernels under one mask, each in several tilings, on the same inputs: compared, timed and recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from experiments.benchmarks.harness import Bench, Way, slug
from experiments.benchmarks.speed.patterns import block_mask, pattern
from experiments.benchmarks.tune.kernel_call import KernelOfAttention
from sparseflash import BlockMask
from sparseflash.backends.triton.configs import Config, Kernel
from sparseflash.backends.triton.overrides import override
from sparseflash.backends.triton.portable.occupancy import held_and_streamed
from sparseflash.backends.triton.schedule.tilings import HALF, Tiling

KINDS = ("butterfly", "local", "bigbird", "random12")
BLOCKS = (128, 64, 32, 16)
KERNELS: tuple[Kernel, ...] = ("forward", "dq", "dk_dv")
OWN, CHOSEN = "own", "chosen"
TARGETS = {128: 1.0, 64: 0.85, 32: 0.6, 16: 0.4}  # relative to the speed per live score in blocks of 128
_CHANNELS = 2048  # all heads together


class Kernels:
    """Inputs of one head dim, 2048 channels in all: bf16, or fp16 on a CPU, because the interpreter has no bf16."""

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
        self, bench: Bench, kind: str, block: int, *, every: bool = False, configs: Sequence[Config] = (),
        kernels: Sequence[Kernel] = KERNELS,
    ) -> None:  # fmt: skip
        """The kernels in the tiles of the mask and in those that the plan chooses.

        every: also in all other tilings that the plan could have chosen. configs: each is timed in the tiling that the
        plan chooses for it. Errors raised by a kernel are passed on.
        """
        mask = block_mask(kind, self.length, block).to(self.device)
        for kernel in kernels:
            calls = self._calls(kernel, mask, every=every, configs=configs)
            for call in calls.values():
                call.run()
            shared = {
                "kind": kind, "block": block, "dim": self.dim, "kernel": kernel, "length": self.length,
                "kept": pattern(kind, self.length, block).kept,
            }  # fmt: skip
            ways = {
                slug(way): Way(
                    call.run,
                    settings=shared | call.settings | {"difference": _difference(call.results, calls[OWN].results)},
                )
                for way, call in calls.items()
            }
            bench.time(f"{kind}/{self.dim}/{block}/{kernel}", ways)

    def _calls(self, kernel: Kernel, mask: BlockMask, *, every: bool, configs: Sequence[Config]) -> dict[str, _Call]:
        """The calls of the kernel, one for each timed tiling and configuration."""
        subject = KernelOfAttention(kernel, mask, self.q, self.k, self.v, self.dout)
        tilings: list[Tiling] = []

        def own(candidates: Sequence[Tiling]) -> Tiling:
            tilings.extend(candidates)
            return candidates[0]

        def call(**choices: Any) -> _Call:
            with override(**choices):
                return self._described(subject)

        calls = {OWN: call(tiling=own), CHOSEN: call(products_for_tilings=0)}
        for tiling in tilings[1:] if every else ():
            if tiling != calls[CHOSEN].tiling:
                calls["x".join(map(str, tiling))] = call(tiling=lambda candidates, taken=tiling: taken)
        for config in configs:
            calls[f"with {config}"] = call(products_for_tilings=0, configs={kernel: config})
        return calls

    def _described(self, subject: KernelOfAttention) -> _Call:
        call, retiling = subject.call(), subject.plan.lists.retiling
        assert retiling is not None
        config, tiling = call.choice.config, call.choice.tiling
        tiles = retiling.count(int(subject.kernel == "dk_dv"), tiling)
        tile = held_and_streamed(subject.kernel, config[:2])
        predicted = HALF.of_tiles(tiles, tiling, tile, self.length, config.num_warps)
        return _Call(
            call.run, {"tiling": "x".join(map(str, tiling)), "config": str(config), "tiles": tiles,
                       "predicted": predicted}, tiling, call.results,
        )  # fmt: skip


@dataclass(frozen=True)
class _Call:
    """A call to time. Its settings: `tiles`, the tiles in the lists of one head; `predicted`, the cost of one head in
    units of a product of 64 x 64 scores.
    """

    run: Callable[[], None]
    settings: dict[str, Any]
    tiling: Tiling
    results: list[torch.Tensor]


def _difference(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    pairs = zip(got, want, strict=True)
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)


assert set(KERNELS) == set(get_args(Kernel))

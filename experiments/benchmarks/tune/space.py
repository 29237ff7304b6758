"""The targets of tuning, and the tile sizes that are tried."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import NamedTuple

import typer

from sparseflash.backends.triton.configs import Arithmetic, Config, Kernel
from sparseflash.backends.triton.portable.fitting import held_and_streamed, results_and_scores

KERNELS: tuple[Kernel, ...] = ("forward", "dk_dv", "dq")
ARITHMETICS: tuple[Arithmetic, ...] = ("half", "tf32", "fp32")
DIMS = (32, 64, 128, 256)

_TILES = (16, 32, 64, 128)
_LIMITS = (128, 168)  # leave a multiprocessor room for 16 warps, or 12
_REGISTERS = 65_536  # of 32 bits, per multiprocessor
_SHARED = 232_448  # bytes per program, the most of any architecture


class Target(NamedTuple):
    """One entry of a table."""

    kernel: Kernel
    arithmetic: Arithmetic
    dim: int  # padded to a power of two
    descriptors: bool  # or by pointers

    def __str__(self) -> str:
        return f"{self.kernel} {self.arithmetic} D={self.dim} {'descriptors' if self.descriptors else 'pointers'}"


def parse(text: str) -> Config:
    """A configuration written as `64x128x8x2`: tile of queries, tile of keys, warps, stages.

    Then x and the limit of registers, if there is one; q if queries are multiplied from registers.

    >>> parse("64x64x4x3x128q")
    Config(block_m=64, block_n=64, num_warps=4, num_stages=3, registers=128, q_in_registers=True)
    """
    parts = text.removesuffix("q").split("x")
    if len(parts) not in (4, 5) or not all(part.isdecimal() for part in parts):
        raise ValueError(
            "expected queries x keys x warps x stages, then x registers if limited, then q if the queries are in "
            f"registers, such as 64x128x8x2; got {text!r}"
        )
    config = Config(*map(int, parts))._replace(q_in_registers=text.endswith("q"))
    if any(number < 1 or number & (number - 1) for number in config[:3]):
        raise ValueError(f"tiles and warps must be powers of two; got {text!r}")
    if config.registers and not 24 <= config.registers <= 255:
        raise ValueError(f"a thread may have 24 to 255 registers; got {text!r}")
    return config


def configs_of(given: Collection[str] | None) -> list[Config]:
    try:
        return [parse(each) for each in given or ()]
    except ValueError as failure:
        raise typer.BadParameter(f"--config: {failure}") from None


def candidates(target: Target) -> list[Config]:
    """Accumulators fit in the registers, and tiles in shared memory."""
    stages = (1, 2, 3, 4)
    half = target.arithmetic == "half"
    limits = (0, *_LIMITS) if half else (0,)
    in_registers = (False, True) if half and target.kernel == "forward" else (False,)
    every = product(_TILES, _TILES, (4, 8), stages, limits, in_registers)
    return [config for config in (Config(*numbers) for numbers in every) if _fits(target, config)]


def _fits(target: Target, config: Config) -> bool:
    size = {"half": 2, "tf32": 4, "fp32": 6}[target.arithmetic]  # fp32: three pieces in bf16
    m, n, dim = config.block_m, config.block_n, target.dim
    held, other = held_and_streamed(target.kernel, (m, n))
    kept, streamed = held * dim * (1 if target.kernel == "forward" else 2), 2 * other * dim
    # A tenth of a thread's registers holds addresses.
    threads = 32 * config.num_warps
    if results_and_scores(target.kernel, m, n, dim) > min(0.9 * (config.registers or 255) * threads, _REGISTERS):
        return False
    # Every warp must have work. In fp32 several warps may share the columns of a few tokens.
    if (held * dim if target.arithmetic == "fp32" else m * n) < 16 * 16 * config.num_warps:
        return False
    shared = size * (kept + config.num_stages * streamed)
    if config.registers:
        # A limit makes room for one more program, which must fit in shared memory, too.
        programs = _REGISTERS // (threads * config.registers)
        return config.num_warps == 4 and not config.q_in_registers and programs * shared <= _SHARED
    return shared <= _SHARED

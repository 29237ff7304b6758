"""Tile sizes by (architecture, head dim, dtype), and what programs of these sizes need.

They were found by measurement. There is no autotuning: the first call compiles only one configuration of each kernel,
and results do not depend on timings.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from sparseflash.backends.triton.launcher import triton_version

Kernel = Literal["forward", "dk_dv", "dq"]
Arithmetic = Literal["half", "tf32", "fp32"]


class Config(NamedTuple):
    """Tile of queries, tile of keys, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    # Maximum of registers per thread, or 0 for no limit. One more resident program per multiprocessor can be worth some
    # spills outside the loops. With 168 registers three programs of four warps fit, with 128 four.
    registers: int = 0
    # Multiply the queries from registers rather than shared memory, which saves reads and space there; forward only.
    q_in_registers: bool = False

    def __str__(self) -> str:
        """The format of `python -m experiments.benchmarks.tune --config`.

        >>> print(Config(64, 128, 4, 2), Config(64, 64, 4, 3, 168), Config(64, 64, 4, 3, q_in_registers=True))
        64x128x4x2 64x64x4x3x168 64x64x4x3q
        """
        numbers = self[:5] if self.registers else self[:4]
        return "x".join(map(str, numbers)) + "q" * self.q_in_registers


_COPYING = triton_version() >= (3, 9)
_SHARED_MEMORY = 227 * 1024  # bytes per multiprocessor of an H100 that programs may use
_REGISTERS = 65_536  # per multiprocessor
_USUAL_REGISTERS = 128  # per thread
_SCORES_A_WARP = 256  # tensor cores process patches of 16 x 16

# (kernel, arithmetic, widest padded head dim) -> configuration. "half" is fp16 and bf16; "fp32" multiplies three pieces
# of every number: see portable/fp32_split.py.
_Table = dict[tuple[Kernel, Arithmetic, int], Config]

# sm_80: 163 KiB of shared memory per program.
_AMPERE: _Table = {
    ("forward", "half", 32): Config(128, 64, 4, 3),
    ("forward", "half", 64): Config(128, 64, 4, 3),
    ("forward", "half", 128): Config(128, 64, 8, 2),
    ("forward", "half", 256): Config(64, 64, 8, 1),
    ("dk_dv", "half", 32): Config(64, 64, 4, 2),
    ("dk_dv", "half", 64): Config(64, 64, 4, 2),
    ("dk_dv", "half", 128): Config(32, 64, 4, 2),
    ("dk_dv", "half", 256): Config(32, 32, 4, 1),
    ("dq", "half", 32): Config(64, 64, 4, 2),
    ("dq", "half", 64): Config(64, 64, 4, 2),
    ("dq", "half", 128): Config(64, 32, 4, 2),
    ("dq", "half", 256): Config(32, 32, 4, 1),
    ("forward", "tf32", 32): Config(64, 64, 4, 2),
    ("forward", "tf32", 64): Config(64, 64, 4, 2),
    ("forward", "tf32", 128): Config(64, 32, 4, 2),
    ("forward", "tf32", 256): Config(32, 32, 4, 1),
    ("dk_dv", "tf32", 32): Config(32, 64, 4, 2),
    ("dk_dv", "tf32", 64): Config(32, 64, 4, 1),
    ("dk_dv", "tf32", 128): Config(32, 32, 4, 1),
    ("dk_dv", "tf32", 256): Config(16, 32, 4, 1),
    ("dq", "tf32", 32): Config(64, 32, 4, 2),
    ("dq", "tf32", 64): Config(64, 32, 4, 1),
    ("dq", "tf32", 128): Config(32, 32, 4, 1),
    ("dq", "tf32", 256): Config(16, 32, 4, 1),
    ("forward", "fp32", 32): Config(64, 32, 4, 2),
    ("forward", "fp32", 64): Config(64, 32, 4, 2),
    ("forward", "fp32", 128): Config(32, 32, 4, 1),
    ("forward", "fp32", 256): Config(16, 32, 4, 1),
    ("dk_dv", "fp32", 32): Config(32, 32, 4, 1),
    ("dk_dv", "fp32", 64): Config(32, 32, 4, 1),
    ("dk_dv", "fp32", 128): Config(32, 16, 4, 1),
    ("dk_dv", "fp32", 256): Config(16, 16, 8, 1),
    ("dq", "fp32", 32): Config(64, 32, 4, 2),
    ("dq", "fp32", 64): Config(32, 32, 4, 1),
    ("dq", "fp32", 128): Config(16, 32, 4, 1),
    ("dq", "fp32", 256): Config(16, 16, 8, 1),
}

# sm_86, sm_89, sm_120: 99 KiB of shared memory per program.
_CONSUMER: _Table = {
    **_AMPERE,
    ("forward", "half", 256): Config(32, 32, 4, 1),
    ("dk_dv", "half", 256): Config(16, 32, 4, 1),
    ("dk_dv", "tf32", 256): Config(16, 16, 4, 1),
    ("forward", "fp32", 256): Config(16, 32, 8, 1),
    ("dk_dv", "fp32", 256): Config(16, 16, 8, 1),
    ("dq", "fp32", 256): Config(16, 16, 8, 1),
}

# sm_90, with tensor descriptors.
_HOPPER: _Table = {
    **_AMPERE,
    ("forward", "half", 32): Config(64, 128, 4, 3),
    ("forward", "half", 64): Config(64, 64, 4, 3, q_in_registers=True),
    ("forward", "half", 128): Config(128, 64, 4, 2),
    ("forward", "half", 256): Config(128, 64, 8, 2),
    ("dk_dv", "half", 32): Config(64, 64, 4, 2),
    ("dk_dv", "half", 64): Config(64, 64, 4, 3, 168),
    ("dk_dv", "half", 128): Config(64, 64, 4, 2),
    ("dk_dv", "half", 256): Config(64, 64, 8, 1),
    ("dq", "half", 32): Config(64, 64, 4, 2),
    ("dq", "half", 64): Config(64, 64, 4, 2, 128),
    ("dq", "half", 128): Config(128, 64, 8, 3),
    ("dq", "half", 256): Config(64, 64, 8, 1),
    ("forward", "fp32", 32): Config(64, 64, 4, 2),
    ("forward", "fp32", 64): Config(64, 32, 4, 2),
    ("forward", "fp32", 128): Config(128, 32, 8, 2),
    ("dk_dv", "fp32", 32): Config(64, 64, 4, 2),
    ("dk_dv", "fp32", 64): Config(32, 64, 4, 2),
    ("dk_dv", "fp32", 128): Config(16, 64, 4, 2),
    ("dq", "fp32", 32): Config(64, 64, 4, 2),
    ("dq", "fp32", 64): Config(64, 32, 4, 2),
    ("dq", "fp32", 128): Config(64, 64, 4, 1),
}

# From Triton 3.9 on, operands in registers are copied before each matrix instruction, so these instructions wait for
# one another.
_HOPPER_COPYING: _Table = {
    **_HOPPER,
    ("forward", "half", 64): Config(64, 128, 4, 2),
}

# Used instead if the mask limits what a program holds to 64 tokens.
_HOPPER_64: _Table = {
    ("forward", "half", 128): Config(64, 64, 4, 2, q_in_registers=not _COPYING),
    ("dq", "half", 128): Config(64, 64, 4, 2),
}

# sm_90 with pointers: their addresses take registers that the largest tiles need.
_HOPPER_POINTERS: _Table = {
    **_HOPPER,
    ("forward", "half", 64): Config(64, 128, 4, 2),
    ("forward", "half", 128): Config(64, 64, 4, 2),
    ("forward", "half", 256): Config(64, 64, 8, 2),
    ("dk_dv", "half", 64): Config(64, 64, 4, 3),
    ("dq", "half", 64): Config(64, 64, 4, 2),
    ("dq", "fp32", 64): Config(64, 32, 4, 1),
}


def config_for(
    kernel: Kernel, capability: tuple[int, int], arithmetic: Arithmetic, padded_dim: int, block: tuple[int, int],
    descriptors: bool,
) -> Config:  # fmt: skip
    """The configuration to run, cut down to the mask's `block = (block_q, block_k)`, which its tiles must divide."""
    entry = kernel, arithmetic, max(padded_dim, 32)
    chosen = _table(capability, descriptors)[entry]
    if capability[0] in (9, 10) and descriptors and held_and_streamed(kernel, block)[0] == 64:
        chosen = _HOPPER_64.get(entry, chosen)
    block_m, block_n = min(chosen.block_m, block[0]), min(chosen.block_n, block[1])
    if arithmetic == "fp32":  # the pieces need the registers of all the warps that share the columns
        is_cut = (block_m, block_n) != chosen[:2] and padded_dim <= 128
        return chosen._replace(block_m=block_m, block_n=block_n, num_warps=4 if is_cut else chosen.num_warps)
    # Tiles cut down by small blocks have less work for many warps. But the accumulators of the widest heads fill the
    # registers of four warps, however few the tokens.
    fewest = 4 if padded_dim > 128 else 1
    num_warps = min(chosen.num_warps, max(fewest, block_m * block_n // _SCORES_A_WARP))
    # Four warps multiply 64 rows. If a tile of 128 rows is cut to 64, eight warps would share its columns: measured on
    # an H100, that takes 1.8 to 2.8 times as long.
    rows, most = held_and_streamed(kernel, (block_m, block_n))[0], held_and_streamed(kernel, chosen[:2])[0]
    if rows == 64 < most and padded_dim <= 128:
        num_warps = min(num_warps, 4)
    if rows < 64 and padded_dim <= 128 and arithmetic == "half":
        num_warps = min(num_warps, _fewest_warps(kernel, block_m, block_n, padded_dim))
    is_whole = (block_m, block_n, num_warps) == chosen[:3]  # otherwise there is no need to limit registers
    return chosen if is_whole else Config(block_m, block_n, num_warps, chosen.num_stages)


def with_more_registers(config: Config, *, lengths: bool, dropout: bool, changes: bool = False) -> Config:
    """The same with a higher register limit, if there is one, for kernels that do more than it was tuned for.

    >>> print(with_more_registers(Config(64, 64, 4, 2, 128), lengths=True, dropout=False))
    64x64x4x2x168

    If the mask has lengths, dq with 128 registers spills in its loop, and ptxas serialises its matrix instructions;
    with dropout, dk_dv with 168 spills 512 bytes or more. With changed scores both happen.
    """
    if config.registers == 128 and (lengths or dropout or changes):
        return config._replace(registers=168)
    return config._replace(registers=0) if dropout or changes else config


def with_addresses(
    kernel: Kernel, config: Config, dim: int, *, arithmetic: Arithmetic, table: bool, whole: bool
) -> Config:  # fmt: skip
    """The same for kernels in which every score reads a number of its own, of a bias or of a `table`.

    >>> print(with_addresses("forward", Config(128, 64, 4, 2), 128, arithmetic="half", table=False, whole=False))
    128x64x8x2
    >>> print(with_addresses("dq", Config(128, 64, 8, 2), 64, arithmetic="half", table=True, whole=False))
    128x32x8x2
    >>> print(with_addresses("dk_dv", Config(16, 64, 4, 2), 128, arithmetic="fp32", table=True, whole=False))
    16x64x4x2

    The addresses of a tile need registers: with those of a table dq spills 960 bytes at D = 64 and 1,300 at D = 128,
    and none so (compiled for 9.0, not timed). whole: the streamed tokens of a step must not be cut.

    In fp32, dk_dv stays with four warps: eight share the columns of 64 keys, so weights of 16 queries pass through
    shared memory in a layout of their own, at addresses that other tiles have had (see `padded_dims` for what ptxas
    makes of that: on an H100, dv at D = 128 was off by 0.4 %).
    """
    if dim > 64 and not (arithmetic == "fp32" and kernel == "dk_dv"):
        config = config._replace(num_warps=max(config.num_warps, 8), registers=0)
    if table and kernel == "dq" and not whole:
        config = config._replace(block_n=max(min(config.block_n, 32), config.block_n // 2), registers=0)
    return config


def _fewest_warps(kernel: Kernel, block_m: int, block_n: int, dim: int) -> int:
    """The fewest warps whose registers hold the results, the scores and, in long steps, the loaded operands.

    If warps share a tile too small for the matrix instructions of four warps, each loads most of the operands itself.
    Measured on an H100 for tiles of 32 x 32: the forward at D = 64 with one warp takes 0.46 of the time of four warps,
    dq 0.58, dk_dv with two warps 0.69. With 160 to 320 numbers per thread it takes 0.9 to 26 times as long, because of
    spills. Almost nothing is spilled with 128 numbers per thread, or with 96 in steps of more than 32 tokens.
    """
    _, streamed = held_and_streamed(kernel, (block_m, block_n))
    warps = -(-results_and_scores(kernel, block_m, block_n, dim) // (32 * (128 if streamed <= 32 else 96)))
    return 1 << (warps - 1).bit_length()


def held_and_streamed(kernel: Kernel, tile: tuple[int, int]) -> tuple[int, int]:
    """`(queries, keys)` as `(held, streamed)`, and back: kernels over columns hold keys, the others hold queries.

    >>> held_and_streamed("dq", (64, 128)), held_and_streamed("dk_dv", (64, 128))
    ((64, 128), (128, 64))
    """
    return tile[::-1] if kernel == "dk_dv" else tile


def results_and_scores(kernel: Kernel, block_m: int, block_n: int, dim: int) -> int:
    """The fp32 numbers that a program keeps in registers: accumulators, the scores of a step, and their gradients."""
    held, streamed = held_and_streamed(kernel, (block_m, block_n))
    results = 2 if kernel == "dk_dv" else 1
    return results * held * dim + held * streamed * (1 if kernel == "forward" else 2)


def padded_dims(dim: int, v_dim: int, capability: tuple[int, int], itemsize: int) -> tuple[int, int]:
    """The columns of the tiles of queries and keys, and of values: powers of two from 16 up.

    >>> padded_dims(72, 80, (9, 0), itemsize=2)
    (128, 128)
    >>> padded_dims(64, 16, (9, 0), itemsize=2), padded_dims(64, 16, (8, 0), itemsize=2)
    ((64, 64), (64, 16))

    On Hopper both must have the same layout in shared memory, where rows are swizzled according to their width, up to
    128 bytes (in bf16, 64 columns). If tiles of two layouts alternate at one address, ptxas 12.8, which comes with
    Triton 3.6 and 3.7, adds to an uninitialised register, and the matrix instructions read the values from a wrong
    address. This was seen for D = 64 with Dv = 16, where rows pass through registers.
    """
    padded, padded_v = (max(16, 1 << (x - 1).bit_length()) for x in (dim, v_dim))
    if capability[0] == 9:
        least = min(max(padded, padded_v), 128 // itemsize)
        return max(padded, least), max(padded_v, least)
    return padded, padded_v


def resident_programs(kernel: Kernel, config: Config, padded_dim: int, itemsize: int) -> int:
    """About how many programs a multiprocessor of an H100 runs at a time, limited by shared memory and registers.

    >>> resident_programs("forward", Config(128, 64, 4, 2), 128, itemsize=2)
    2
    >>> resident_programs("forward", Config(64, 64, 4, 3, q_in_registers=True), 64, itemsize=2)
    4
    >>> resident_programs("dk_dv", Config(64, 64, 4, 3, 168), 64, itemsize=2)
    3

    A program holds the queries (unless they are in registers), or queries and gradients, or keys and values, plus two
    streamed tiles per stage.
    """
    held, streamed = held_and_streamed(kernel, config[:2])
    if kernel != "forward":
        held *= 2
    elif config.q_in_registers:
        held = 0
    tokens = held + streamed * 2 * config.num_stages
    registers = 32 * config.num_warps * (config.registers or _USUAL_REGISTERS)
    return max(1, min(_SHARED_MEMORY // (tokens * padded_dim * itemsize), _REGISTERS // registers))


def _table(capability: tuple[int, int], descriptors: bool) -> _Table:
    if capability[0] == 8 and capability[1] == 0:
        return _AMPERE
    if capability[0] in (9, 10):
        if not descriptors:
            return _HOPPER_POINTERS
        return _HOPPER_COPYING if _COPYING else _HOPPER
    return _CONSUMER


def arithmetic_of(dtype: torch.dtype, tf32: bool) -> Arithmetic:
    """How products of this dtype are computed."""
    if dtype != torch.float32:
        return "half"
    return "tf32" if tf32 else "fp32"


def has_room_for_pieces(capability: tuple[int, int], padded_dim: int) -> bool:
    """Whether tiles in three pieces fit in shared memory; if not, tiles are split just before they are multiplied."""
    return padded_dim <= 128 or _table(capability, False) is not _CONSUMER

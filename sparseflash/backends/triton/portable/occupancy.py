"""The registers and shared memory of a program, and how many programs run at a time."""

from __future__ import annotations

from sparseflash.backends.triton.architecture import Architecture
from sparseflash.backends.triton.configs import Config, Kernel

_SHARED_MEMORY = 227 * 1024  # bytes per SM of an H100 that programs may use
_REGISTERS = 65_536  # per SM
_USUAL_REGISTERS = 128  # per thread


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


def padded_dims(dim: int, v_dim: int, architecture: Architecture, itemsize: int) -> tuple[int, int]:
    """The columns of the tiles of queries and keys, and of values: powers of two from 16 up.

    >>> from sparseflash.backends.triton.architecture import architecture_of
    >>> ampere, hopper = architecture_of((8, 0)), architecture_of((9, 0))
    >>> padded_dims(72, 80, hopper, itemsize=2)
    (128, 128)
    >>> padded_dims(64, 16, hopper, itemsize=2), padded_dims(64, 16, ampere, itemsize=2)
    ((64, 64), (64, 16))

    On Hopper both must have the same layout in shared memory, where the swizzle depends on the width of rows, up to 128
    bytes (64 columns in bf16). If tiles of two layouts alternate at one address, ptxas 12.8 (of Triton 3.6 and 3.7)
    adds to an uninitialised register, and wgmma reads the values from a wrong address. This was seen for D = 64 with
    Dv = 16, where rows pass through registers.
    """
    padded, padded_v = max(16, 1 << (dim - 1).bit_length()), max(16, 1 << (v_dim - 1).bit_length())
    if architecture.needs_one_layout:
        least = min(max(padded, padded_v), 128 // itemsize)
        return max(padded, least), max(padded_v, least)
    return padded, padded_v


def resident_programs(kernel: Kernel, config: Config, padded_dim: int, itemsize: int) -> int:
    """The approximate number of resident programs per SM of an H100, limited by shared memory and registers.

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

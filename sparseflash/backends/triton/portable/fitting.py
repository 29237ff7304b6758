"""The configuration of a kernel for one call: taken from the tables, then fitted to the mask's blocks, to lengths, to
dropout and to score modifications.
"""

from __future__ import annotations

from collections.abc import Collection

from sparseflash.backends.triton.architecture import Architecture
from sparseflash.backends.triton.configs import Arithmetic, Config, Kernel
from sparseflash.scores.change import PAIRS

_SCORES_A_WARP = 256  # tensor cores process patches of 16 x 16
# Of an SM of an H100, on every GPU: results must not depend on the GPU.
_SHARED_MEMORY = 227 * 1024  # bytes that programs may use
_REGISTERS = 65_536  # per SM
_USUAL_REGISTERS = 128  # per thread


def config_for(
    kernel: Kernel, architecture: Architecture, arithmetic: Arithmetic, padded_dim: int, block: tuple[int, int],
    descriptors: bool, tuned: Config | None = None,
) -> Config:  # fmt: skip
    """The configuration to run, cut down to the mask's `block = (block_q, block_k)`, which its tiles must divide.

    tuned: a configuration to cut down instead of the table's.
    """
    entry = kernel, arithmetic, max(padded_dim, 32)
    chosen = tuned or architecture.tables.of(descriptors)[entry]
    held = int(kernel == "dk_dv")
    if tuned is None and descriptors and block[held] == 64:
        chosen = architecture.tables.held_64.get(entry, chosen)
    block_m, block_n = min(chosen.block_m, block[0]), min(chosen.block_n, block[1])
    if arithmetic == "fp32":  # the pieces need the registers of at least four warps
        is_cut = (block_m, block_n) != chosen[:2] and padded_dim <= 128
        return chosen._replace(block_m=block_m, block_n=block_n, num_warps=4 if is_cut else chosen.num_warps)
    # Tiles cut down to small blocks need fewer warps. But the accumulators of the widest heads fill the registers of
    # four warps, even for few tokens.
    fewest = 4 if padded_dim > 128 else 1
    num_warps = min(chosen.num_warps, max(fewest, block_m * block_n // _SCORES_A_WARP))
    # Four warps multiply 64 rows. If a tile of 128 rows is cut to 64, eight warps would share its columns: measured on
    # an H100, that takes 1.8 to 2.8 times as long.
    rows = (block_m, block_n)[held]
    if rows == 64 < chosen[held] and padded_dim <= 128:
        num_warps = min(num_warps, 4)
    if rows < 64 and padded_dim <= 128 and arithmetic == "half":
        num_warps = min(num_warps, _fewest_warps(kernel, block_m, block_n, padded_dim))
    is_whole = (block_m, block_n, num_warps) == chosen[:3]  # otherwise there is no need to limit registers
    return chosen if is_whole else Config(block_m, block_n, num_warps, chosen.num_stages)


def tuned_for_scores(
    kernel: Kernel, architecture: Architecture, arithmetic: Arithmetic, padded_dim: int, changes: Collection[str]
) -> Config | None:
    """The configuration of descriptors that was tuned for these kinds of score modifications, or None.

    >>> from sparseflash.backends.triton.architecture import architecture_of
    >>> hopper = architecture_of((9, 0))
    >>> print(tuned_for_scores("dk_dv", hopper, "half", 128, {"bias", "softcap"}))
    64x64x4x2
    >>> print(tuned_for_scores("dk_dv", hopper, "half", 128, {"bias", "relative"}))
    None
    """
    entry, tables = (kernel, arithmetic, padded_dim), architecture.tables
    if "function" in changes:
        return None
    if "relative" in changes:
        return None if set(PAIRS) & set(changes) else tables.table.get(entry)
    if "tile_bias" in changes:
        return tables.tile_biased.get(entry)
    return tables.biased.get(entry) if "bias" in changes else None


def with_more_registers(config: Config, *, lengths: bool, dropout: bool, changes: bool = False) -> Config:
    """Raises the register limit of a configuration, if it has one, for kernels that do more than it was tuned for.

    >>> print(with_more_registers(Config(64, 64, 4, 2, 128), lengths=True, dropout=False))
    64x64x4x2x168

    With lengths, dq with 128 registers spills in its loop, and ptxas serialises its wgmmas; with dropout, dk_dv with
    168 registers spills; with score modifications both happen.
    """
    if config.registers == 128 and (lengths or dropout or changes):
        return config._replace(registers=168)
    return config._replace(registers=0) if dropout or changes else config


def with_addresses(
    kernel: Kernel, config: Config, dim: int, *, arithmetic: Arithmetic, table: bool, whole: bool
) -> Config:  # fmt: skip
    """Fits a configuration to kernels that load one number per score, from a pair bias or (if `table`) from a table.

    >>> print(with_addresses("forward", Config(128, 64, 4, 2), 128, arithmetic="half", table=False, whole=False))
    128x64x8x2
    >>> print(with_addresses("dq", Config(128, 64, 8, 2), 64, arithmetic="half", table=True, whole=False))
    128x32x8x2
    >>> print(with_addresses("dk_dv", Config(16, 64, 4, 2), 128, arithmetic="fp32", table=True, whole=False))
    16x64x4x2

    The addresses of these loads need registers; with a table dq would spill about 1,000 bytes, with the result none.
    whole: the streamed tokens of a step must not be cut.

    In fp32, dk_dv keeps four warps. Eight would share the columns of 64 keys, so weights of 16 queries would pass
    through shared memory in another layout than other tiles at the same address, which ptxas miscompiles (see
    `padded_dims`).
    """
    if dim > 64 and not (arithmetic == "fp32" and kernel == "dk_dv"):
        config = config._replace(num_warps=max(config.num_warps, 8), registers=0)
    if table and kernel == "dq" and not whole:
        config = config._replace(block_n=max(min(config.block_n, 32), config.block_n // 2), registers=0)
    return config


def _fewest_warps(kernel: Kernel, block_m: int, block_n: int, dim: int) -> int:
    """The fewest warps whose registers hold the accumulators, the scores and, in long steps, the loaded operands.

    If warps share a tile too small for wgmma, which takes four warps, each warp loads most of the operands. So fewer
    warps are faster (experiments/results/tried/portable.csv), until kernels spill. Almost nothing is spilled with 128
    numbers per thread, or with 96 in steps of more than 32 tokens.
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


def padded_dims(dim: int, v_dim: int, architecture: Architecture, itemsize: int) -> tuple[int, int]:
    """The columns of the tiles of queries and keys, and of values: powers of two from 16 up.

    >>> from sparseflash.backends.triton.architecture import architecture_of
    >>> ampere, hopper = architecture_of((8, 0)), architecture_of((9, 0))
    >>> padded_dims(72, 80, hopper, itemsize=2)
    (128, 128)
    >>> padded_dims(64, 16, hopper, itemsize=2), padded_dims(64, 16, ampere, itemsize=2)
    ((64, 64), (64, 16))

    On Hopper both must have the same layout in shared memory, where the swizzle depends on the width of rows up to 128
    bytes. If tiles of two layouts alternate at one address, ptxas 12.8 (of Triton 3.6 and 3.7) adds to an uninitialised
    register, as seen for D = 64 with Dv = 16.
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

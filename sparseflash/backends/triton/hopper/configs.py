"""Configurations of the Hopper kernels, by head dim."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from sparseflash.blockmask.cache import bounded

ROWS = 64  # queries of a warpgroup in the forward: the rows of a matrix instruction
GROUPS = 2  # warpgroups that multiply
CHANNELS = 16  # of queries and keys in a matrix instruction
BLOCK = (GROUPS * ROWS, 128)  # queries and keys of a tile
SMALL = (ROWS, 64)  # the forward's tile for masks in blocks of this size
HEAD_DIMS = (64, 96, 128)  # with a configuration of their own, D = Dv
WIDEST = 256
SHARED_MEMORY = 227 * 1024  # bytes that a program may have
# Bytes that a program may have, by the number of programs of a multiprocessor, which keeps 1 KB of each for itself. And
# the registers of a thread at launch: the threads of all programs use the whole register file. One program has 384
# threads, each of several 256.
MOST_MEMORY = {1: SHARED_MEMORY, 2: 113 * 1024, 3: 75 * 1024}
START_REGISTERS = {1: 168, 2: 128, 3: 80}
_BARRIERS = 1024  # bytes for barriers, numbers and alignment to 1,024
_SMALL_THINGS = 2048  # bytes for barriers, numbers and alignment to 1,024
# -inf times a scale of 0 would be NaN. This scale replaces smaller ones with the same result: exp2 of it times a score
# of 1e9 is 1. (`attention` passes no scale below 1e-20 to its kernels.)
SMALLEST_SCALE = 1e-30
# In units of log2(e): fp32 sums beyond this are known to a few powers of 2 only. A bias may be the lowest number of
# fp32.
COARSE = 2.0**26


@dataclass(frozen=True)
class Shape:
    """The tiles and buffers of the forward kernel: its compile-time argument SHAPE.

    Triton identifies a compile-time argument by its text, in which a dataclass has all its numbers.
    """

    BLOCK_N: int  # keys of a step
    SPLIT: int  # steps of a tile of the lists, whose queries are GROUPS * ROWS
    # Channels of queries and keys, and of values, in two pieces, the second 0 if there is one; channels of a chunk.
    D: int
    D_REST: int
    DV: int
    DV_REST: int
    PADDED_DV: int
    OUT: int  # channels of out, of the first DV, that are written at a time: all or half
    GROUPS: int  # warpgroups that share an item
    STREAMS: int  # with items of their own
    STAGES: int  # of keys and values
    Q_BUFFERS: int  # of queries, 1 or 2
    KEPT: int  # pieces of queries in registers, see `consumer`
    IN_TURNS: bool  # see `consumer`
    REGISTERS: int
    LOADER_REGISTERS: int


@dataclass(frozen=True)
class BackwardShape:
    """The tiles and buffers of the backward kernel: its compile-time argument SHAPE."""

    D: int  # channels of tiles
    USED: int  # channels of queries and keys that may not be 0, in two pieces
    REST: int
    V_USED: int  # the same of values
    V_REST: int
    ROWS: int  # queries of a step, 64 or 128
    JOINED: int  # steps whose dq is one product
    KEPT: bool  # whether keys and values are in registers, too
    Q_STAGES: int
    DOUT_STAGES: int
    REGISTERS: int


class Config(NamedTuple):
    """The tuning parameters of the forward kernel."""

    # Channels of queries and keys, and of values, in one or two pieces; narrower heads are padded with zeros.
    dims: tuple[int, int]
    v_dims: tuple[int, int]
    stages: int  # of keys and values of a stream, `keys` times all of these channels
    tile: tuple[int, int] = BLOCK
    streams: int = 1  # of items, each with its own warpgroups
    q_buffers: int = 2  # of a stream
    registers: int = 240  # a thread of the warpgroups
    loader_registers: int = 24
    # Registers of a thread at launch: 384 threads of 168 use the whole register file.
    start_registers: int = 168
    split: int = 1  # steps of a tile
    out_pieces: int = 1  # in which the first channels of out are written, through a buffer for one of them
    kept: int = 0  # pieces of queries in registers
    in_turns: bool = False  # whether the warpgroups begin their softmaxes by turns

    @property
    def dim(self) -> int:
        return sum(self.dims)

    @property
    def keys(self) -> int:
        return self.tile[1] // self.split

    @property
    def padded_v_dim(self) -> int:
        """The channels of a chunk, which `combine_rows_kernel` reads: a power of 2."""
        return padded(sum(self.v_dims))

    @property
    def groups(self) -> int:
        return self.tile[0] // ROWS

    @property
    def shape(self) -> Shape:
        return Shape(
            self.keys, self.split, *self.dims, *self.v_dims, self.padded_v_dim, self.v_dims[0] // self.out_pieces,
            self.groups, self.streams, self.stages, self.q_buffers, self.kept, self.in_turns, self.registers,
            self.loader_registers,
        )  # fmt: skip

    @property
    def shared_memory(self) -> int:
        of_queries = self.q_buffers * self.tile[0] * self.dim
        of_keys = self.stages * self.keys * (self.dim + sum(self.v_dims))
        of_out = self.tile[0] * (self.v_dims[0] // self.out_pieces + self.v_dims[1])
        return self.streams * 2 * (of_queries + of_keys + of_out) + _SMALL_THINGS

    def with_biases(self) -> Config:
        """This configuration with one buffer of queries at D = 128: biases of keys or pairs take the other's memory."""
        return self._replace(q_buffers=1) if self.dim == 128 else self


class BackwardConfig(NamedTuple):
    """The tuning parameters of the backward kernel."""

    dim: int  # of all tiles; narrower heads are padded with zeros
    rows: int  # queries of a step
    q_stages: int  # of queries, rows * dim numbers each
    dout_stages: int
    joined: int = 1  # steps whose dq is one product
    kept: bool = False  # whether keys and values are in registers, too
    registers: int = 24  # a thread of the warps that load and send; the rest goes to the warpgroups
    start_registers: int = 168

    def with_pairs(self) -> BackwardConfig:
        """This configuration with two buffers of queries: a bias of pairs takes the memory of a third."""
        return self._replace(q_stages=2)


class DkDvConfig(NamedTuple):
    """The tuning parameters of the kernels for dk and dv of wide heads or blocks of 64."""

    dims: tuple[int, int]  # channels of queries and keys, and of values, in one or two pieces
    v_dims: tuple[int, int]
    q_stages: int
    dout_stages: int
    early: bool = False  # whether dP is multiplied before the exponentials
    apart: bool = False  # whether one warpgroup has dk, and the other dv, of the same ROWS keys
    programs: int = 1  # of a multiprocessor; with several, each has one warpgroup that multiplies
    registers: int = 240  # of the second warpgroup; the first has what is left
    loader_registers: int = 24

    @property
    def groups(self) -> int:
        return GROUPS if self.programs == 1 else 1

    @property
    def start_registers(self) -> int:
        return START_REGISTERS[self.programs]

    @property
    def shared_memory(self) -> int:
        dim, v_dim = sum(self.dims), sum(self.v_dims)
        of_keys = ROWS * (dim + v_dim + ROWS) if self.apart else self.groups * ROWS * (dim + v_dim)
        of_queries = ROWS * (self.q_stages * dim + self.dout_stages * v_dim)
        return 2 * (of_keys + of_queries) + 8 * ROWS * self.q_stages + _BARRIERS


class DqConfig(NamedTuple):
    """The tuning parameters of the kernel for dq of wide heads or blocks of 64."""

    dims: tuple[int, int]  # channels of queries and keys, and of values, in one or two pieces
    v_dims: tuple[int, int]
    stages: int  # of keys
    v_stages: int  # of values
    programs: int = 1  # as above
    registers: int = 240
    loader_registers: int = 24

    @property
    def groups(self) -> int:
        return GROUPS if self.programs == 1 else 1

    @property
    def start_registers(self) -> int:
        return START_REGISTERS[self.programs]

    @property
    def shared_memory(self) -> int:
        dim, v_dim = sum(self.dims), sum(self.v_dims)
        of_keys = WIDE_KEYS * (self.stages * dim + self.v_stages * v_dim)
        return 2 * (self.groups * ROWS * (dim + v_dim) + of_keys) + _BARRIERS


def is_common(dims: tuple[int, int]) -> bool:
    """Whether D and Dv are equal and have a configuration of their own, which all measurements were made with."""
    return dims[0] == dims[1] and dims[0] in HEAD_DIMS


def padded(dim: int) -> int:
    """The next power of 2.

    >>> padded(80), padded(128)
    (128, 128)
    """
    return 1 << (dim - 1).bit_length()


def pieces_of(dim: int) -> tuple[int, int]:
    """Splits a head dim into one or two powers of 2 from 16 on, with the least sum of at least `dim`; the second may be
    0.

    >>> [pieces_of(dim) for dim in (8, 24, 72, 80, 96, 104, 192, 200)]
    [(16, 0), (32, 0), (64, 16), (64, 16), (64, 32), (128, 0), (128, 64), (256, 0)]
    """
    powers = [1 << i for i in range(4, 9)]
    sums = [(a + b, b > 0, a, b) for a in powers for b in (0, *powers) if b < a and a + b >= dim]
    return min(sums)[2:]


def value_pieces_of(dim: int) -> tuple[int, int]:
    """The pieces of values in the forward: one of 64 channels instead of two of 32 and 16, which took 1.06 of the time
    at D = 48, because a product with weights from registers takes about as long for 16 channels as for 64.

    >>> [value_pieces_of(dim) for dim in (16, 40, 48, 64, 80)]
    [(16, 0), (64, 0), (64, 0), (64, 0), (64, 16)]
    """
    pieces = pieces_of(dim)
    return (64, 0) if pieces == (32, 16) else pieces


# At D = 96 values are multiplied as 128 channels. In two pieces they took 1.07 of the time: presumably a product with
# weights from registers takes as long for 32 channels as for 64.
_MEASURED = {
    BLOCK: {
        64: Config((64, 0), (64, 0), 4, in_turns=True), 96: Config((64, 32), (128, 0), 2),
        128: Config((128, 0), (128, 0), 2),
    },
    SMALL: {
        64: Config((64, 0), (64, 0), 4, SMALL, 2, kept=1), 96: Config((64, 32), (128, 0), 2, SMALL, 2, kept=2),
        128: Config((128, 0), (128, 0), 2, SMALL, 2, kept=1),
    },
}  # fmt: skip
_BACKWARD = {
    32: BackwardConfig(32, 128, 2, 2), 64: BackwardConfig(64, 128, 2, 2), 128: BackwardConfig(128, 64, 3, 2),
}  # fmt: skip
# From 65 to MOST_JOINED channels, dq of two steps is one product. At D = 96 that takes 1.03 of the time.
_JOINED = BackwardConfig(128, 64, 2, 2, 2)
MOST_JOINED = 80
# At D = 64, steps of 128 queries spill with a soft cap, and take 1.5 to 1.6 times as long as these under Triton 3.6.
# Beside other score modifications these spill, too.
_CAPPED = BackwardConfig(64, 64, 4, 4, 2, kept=True)
WIDEST_BACKWARD = 128  # of the kernel with tiles of 128 keys
# Channels of dk and dv together, of 64 keys, in the registers of a warpgroup; and with two pieces each, for which
# ptxas of Triton 3.9 needs more registers.
MOST_CHANNELS = 320
MOST_CHANNELS_IN_PIECES = 288
WIDE_KEYS = 64  # of a step of the kernel for dq of wider heads
_STAGES = ((3, 3), (3, 2), (2, 2), (2, 1))  # tried, of queries and dout, or of keys and values


def dkdv_config_for(head_dim: int, value_dim: int, tile: tuple[int, int] = BLOCK) -> DkDvConfig:
    """The configuration of the kernel for dk and dv: apart if their accumulators leave a warpgroup too few registers.

    >>> [dkdv_config_for(*dims).apart for dims in ((192, 128), (192, 192), (256, 256))]
    [False, True, True]
    >>> dkdv_config_for(128, 128, SMALL)[2:4]
    (2, 2)
    """
    dims, v_dims = pieces_of(head_dim), pieces_of(value_dim)
    most = MOST_CHANNELS_IN_PIECES if dims[1] and v_dims[1] else MOST_CHANNELS
    channels, programs = sum(dims) + sum(v_dims), 2 if tile == SMALL else 1
    tried = (DkDvConfig(dims, v_dims, *stages, channels <= 256, channels > most, programs) for stages in _STAGES)
    return next(each for each in tried if each.shared_memory <= MOST_MEMORY[programs])


def dq_config_for(head_dim: int, value_dim: int, tile: tuple[int, int] = BLOCK) -> DqConfig:
    """The configuration of the kernel for dq: as many stages as shared memory has room for.

    >>> dq_config_for(192, 128)[:4], dq_config_for(256, 256)[2:4]
    (((128, 64), (128, 0), 3, 3), (2, 1))
    >>> [dq_config_for(dim, dim, SMALL).programs for dim in (64, 128)]
    [3, 2]
    """
    # Up to 64 channels, dq, scores and their gradients fit the 136 registers that three programs leave a warpgroup.
    programs = 1 if tile == BLOCK else 3 if max(head_dim, value_dim) <= 64 else 2
    tried = (DqConfig(pieces_of(head_dim), pieces_of(value_dim), *each, programs) for each in _STAGES)
    return next(each for each in tried if each.shared_memory <= MOST_MEMORY[programs])


@bounded(256)
def config_for(head_dim: int, tile: tuple[int, int], value_dim: int | None = None) -> Config:
    """The configuration of the forward for head dims up to WIDEST, in tiles of `tile_for`.

    >>> config_for(96, BLOCK).dims, config_for(80, BLOCK).dims, config_for(192, BLOCK, 128).v_dims
    ((64, 32), (64, 16), (128, 0))
    """
    if is_common((head_dim, value_dim or head_dim)):
        return _MEASURED[tile][head_dim]
    return next(each for each in _tried(head_dim, value_dim or head_dim, tile) if each.shared_memory <= SHARED_MEMORY)


def _tried(head_dim: int, value_dim: int, tile: tuple[int, int]) -> Iterator[Config]:
    dims, v_dims = pieces_of(head_dim), value_pieces_of(value_dim)
    if tile == SMALL:
        base = Config(dims, v_dims, 0, SMALL, 2, kept=2 if dims[1] else 1)
    else:
        base = Config(dims, v_dims, 0, in_turns=max(sum(dims), sum(v_dims)) <= 64)
    # The output accumulator, scores and weights share a thread's registers: 128 + 64 + 32 would be too many.
    splits = (1, 2) if sum(v_dims) <= 192 and tile == BLOCK else (2,) if tile == BLOCK else (1,)
    for split in splits:
        for q_buffers, out_pieces in ((2, 1), (1, 1), (1, 2)):
            for stages in (2,) if 64 < max(sum(dims), sum(v_dims)) < 128 else (4, 3, 2):
                yield base._replace(split=split, q_buffers=q_buffers, out_pieces=out_pieces, stages=stages)


def tile_for(block: tuple[int, int], dims: tuple[int, int] = (64, 64)) -> tuple[int, int]:
    """The tiles of the forward for a mask in blocks of `block`. dims: D and Dv; wide heads leave no room for two
    streams.

    >>> tile_for((64, 64)), tile_for((32, 128)), tile_for((64, 64), (192, 128))
    ((64, 64), (128, 128), (128, 128))
    """
    return SMALL if block == SMALL and max(dims) <= 128 else BLOCK


def may_be_small(block: tuple[int, int], dims: tuple[int, int], kinds: Collection[str]) -> bool:
    """Whether the backward has kernels in tiles of 64 for a mask in blocks of `block`. kinds: of score modifications.

    >>> may_be_small((64, 64), (128, 128), ["sink"]), may_be_small((64, 64), (128, 128), ["alibi"])
    (True, False)
    """
    return block == SMALL and max(dims) <= WIDEST_BACKWARD and {"sink"}.issuperset(kinds)


def backward_config_for(head_dim: int, value_dim: int = 0, kinds: Collection[str] = ()) -> BackwardConfig:
    """The configuration of the backward for head dims up to WIDEST_BACKWARD. kinds: of score modifications.

    >>> backward_config_for(96).dim, backward_config_for(16, 48).dim
    (128, 64)
    >>> [backward_config_for(80, kinds=kinds).joined for kinds in ((), ("sink",), ("softcap",))]
    [2, 2, 1]
    >>> [backward_config_for(64, kinds=kinds).joined for kinds in ((), ("softcap",), ("softcap", "distance"))]
    [1, 2, 1]
    """
    widest = max(head_dim, value_dim)
    if 64 < widest <= MOST_JOINED and {"sink"}.issuperset(kinds):
        return _JOINED
    tiles = max(32, padded(widest))
    is_capped = "softcap" in kinds and {"softcap", "sink"}.issuperset(kinds)
    return _CAPPED if tiles == 64 and is_capped else _BACKWARD[tiles]


def used_of(dim: int, of_tiles: int) -> tuple[int, int]:
    """The channels that the backward multiplies, of tiles with this many, in one or two pieces: at least 64, because a
    swizzled row of shared memory has 64.

    >>> [used_of(dim, 128) for dim in (40, 80, 96, 128)], used_of(32, 32)
    ([(64, 0), (64, 16), (64, 32), (128, 0)], (32, 0))
    """
    return pieces_of(max(dim, 64)) if of_tiles > 64 else (of_tiles, 0)

"""How the kernels for Hopper are built for a head dim. Every configuration here is compiled by a test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sparseflash.blockmask.cache import bounded

ROWS = 64  # queries of a warpgroup in the forward, which is what a matrix instruction takes
GROUPS = 2  # warpgroups that multiply
CHANNELS = 16  # of queries and keys that a matrix instruction takes
BLOCK = (GROUPS * ROWS, 128)  # queries and keys of a tile
SMALL = (ROWS, 64)  # of masks in such blocks, in the forward
HEAD_DIMS = (64, 96, 128)  # with a configuration of their own, D = Dv
# D and Dv for which these kernels are chosen where they are faster. Others are served where they are asked for.
MEASURED_DIMS = frozenset((dim, dim) for dim in HEAD_DIMS)
WIDEST = 256
SHARED_MEMORY = 227 * 1024  # bytes that a program may have
_SMALL_THINGS = 2048  # bytes for barriers and numbers, and for places at multiples of 1,024
# Scores of -inf times a scale that is 0 in fp32 would be NaN. For smaller scales this is as good: 2 to the power of a
# score of 1e9 times it is 1. (`attention` gives its kernels none below 1e-20.)
SMALLEST_SCALE = 1e-30
# In units of log2(e), a sum of so much is known to a few powers of 2 only. Biases may be as low as fp32 holds.
COARSE = 2.0**26


class Config(NamedTuple):
    """What the forward kernel takes besides its arguments."""

    # Channels of queries and keys, and of values, in one or two pieces; what a head has less is zeros.
    dims: tuple[int, int]
    v_dims: tuple[int, int]
    stages: int  # of keys and values of a stream, `keys` times all of these channels
    tile: tuple[int, int] = BLOCK
    streams: int = 1  # of items, each with its own warpgroups
    q_buffers: int = 2  # of a stream
    registers: int = 240  # a thread of the warpgroups
    loader_registers: int = 24
    # What each thread has when the kernel starts: 384 threads of 168 are all that there are.
    start_registers: int = 168
    split: int = 1  # steps of a tile
    out_pieces: int = 1  # in which the first channels of out are written, through a buffer for one of them
    kept: int = 0  # pieces of queries in registers
    in_turns: bool = False  # whether the warpgroups begin their softmaxes by turns

    @property
    def dim(self) -> int:
        """All channels of queries and keys."""
        return sum(self.dims)

    @property
    def keys(self) -> int:
        """Keys of a step."""
        return self.tile[1] // self.split

    @property
    def padded_v_dim(self) -> int:
        """The channels of a chunk, which `combine_rows_kernel` reads: a power of 2."""
        return padded(sum(self.v_dims))

    @property
    def groups(self) -> int:
        """The warpgroups that share an item."""
        return self.tile[0] // ROWS

    @property
    def shared_memory(self) -> int:
        """Bytes."""
        of_queries = self.q_buffers * self.tile[0] * self.dim
        of_keys = self.stages * self.keys * (self.dim + sum(self.v_dims))
        of_out = self.tile[0] * (self.v_dims[0] // self.out_pieces + self.v_dims[1])
        return self.streams * 2 * (of_queries + of_keys + of_out) + _SMALL_THINGS

    def with_biases(self) -> Config:
        """The same where biases, of keys or of pairs, take the place of queries that are loaded ahead."""
        return self._replace(q_buffers=1) if self.dim == 128 else self


class BackwardConfig(NamedTuple):
    """What the backward kernel takes besides its arguments."""

    dim: int  # of all tiles; what a head has less is zeros
    rows: int  # queries of a step
    q_stages: int  # of queries, rows * dim numbers each
    dout_stages: int
    registers: int = 24  # a thread of the warps that load and send; the warpgroups get what is left
    start_registers: int = 168

    def with_pairs(self) -> BackwardConfig:
        """The same where a bias of pairs takes the place of queries that are loaded ahead."""
        return self._replace(q_stages=2)


class WideConfig(NamedTuple):
    """What the backward kernel for wide heads takes besides its arguments."""

    dim: int  # of tiles of queries and keys, and of values
    v_dim: int
    q_stages: int = 2
    chunks: int = 2  # in which dq leaves, by channels, 2 or 4
    registers: int = 24
    start_registers: int = 168
    rows: int = 64


class Limits(NamedTuple):
    """Where these kernels are faster than the portable ones. Of one head, so that no row's bits depend on its batch;
    but for `most_room`, as gradients depend on it in any case.

    Measured on an H200 with 4 and 32 heads of 256 to 16,384 tokens, bf16, under causal, dense, local and butterfly
    masks. Time of the portable kernels over that of these: forward D=128 1.03 to 1.96 everywhere; D=64 0.69 to 0.92 at
    1,024 tokens, 0.86 to 1.17 at 4,096, 0.89 to 0.95 where queries see 8,000 keys and more. Backward 0.79 to 0.92 at
    256 tokens, 0.86 to 1.19 at 1,024, 0.94 to 1.50 from 4,096 on. Forward of 64 queries and 4,096 keys, D=128, 32
    heads: 2.8, as the portable kernels do not cut the keys.

    On an H200, in blocks of 64 the forward takes 0.71 to 0.96 of the time of the portable one at D=96 and 128 under
    causal and local masks of 512 to 8,192 tokens and 0.80 to 0.90 under all from 16,384 on; where a row has few tiles,
    as of a butterfly, 1.0 to 1.5 of up to 25 us below 2,048 tokens, or with 4 heads; 1.03 to 1.16 at D=64.

    Under a mask of blocks of 128 that is made at every step, of 16 heads, 64 in groups of 16, and 4 heads, plan
    included, as with a CUDA graph: forward at D=128 0.81 to 0.96 at 1,024 and 2,048 tokens, 0.75 to 0.86 from 4,096 on,
    at D=96 0.76, at D=64 0.85 to 1.14; with the backward at D=128 0.94 to 1.12 at 4,096, 0.95 to 1.04 at 8,192, 0.87 to
    0.92 at 16,384; at D=64 with groups 0.90 there and 1.07 to 1.5 without. Started launch by launch by a host that
    needs 3 ms for a step, forward and backward at D=128 took 1.04 to 1.33 of it up to 8,192 tokens, 0.94 and 1.23 at
    16,384, when the plans had more launches than now. Now, in groups of 16: 1.20 at 4,096, 1.00 at 8,192 and 0.94 at
    16,384.

    With changed scores, on an H100 under causal and local masks of 8,192 tokens, the portable kernels were faster under
    a soft cap at D=64, and forward with a logarithmic decay.

    At D=64 under dense and causal masks of 16,384 tokens, on an H200, it depends on what else the GPU does: with pauses
    between calls the portable forward took 0.93 and 0.95 of the time of this one, and without pauses, where the power
    limit lowers the clock, 1.06 and 1.10.
    """

    forward_queries_64: int = 4096
    forward_queries_small: int = 1024  # in blocks of 64
    forward_queries_dynamic: int = 4096  # of a mask that is made at every step
    backward_queries: int = 1024
    most_keys: int = 5120  # of a query, for the forward at D=64
    most_keys_a_query: int = 4  # times the queries; more are worth being cut, as the portable kernels do
    backward_queries_dynamic: int = 16_384  # of a mask that is made at every step
    most_room: float = 1 / 8  # of the memory of q, for the backward's lists of such a mask

    def least_queries(self, dim: int, block: tuple[int, int], *, backward: bool, dynamic: bool) -> int:
        """The fewest queries of a head."""
        if backward:
            return self.backward_queries_dynamic if dynamic else self.backward_queries
        if dynamic:
            return self.forward_queries_dynamic
        if block == SMALL:
            return self.forward_queries_small
        return self.forward_queries_64 if dim == 64 else 1


LIMITS = Limits()


def padded(dim: int) -> int:
    """The next power of 2.

    >>> padded(80), padded(128)
    (128, 128)
    """
    return 1 << (dim - 1).bit_length()


def pieces_of(dim: int) -> tuple[int, int]:
    """The fewest channels, at least `dim`, that are a power of 2 from 16 on, or the sum of two; the second may be 0.

    >>> [pieces_of(dim) for dim in (8, 24, 72, 80, 96, 104, 192, 200)]
    [(16, 0), (32, 0), (64, 16), (64, 16), (64, 32), (128, 0), (128, 64), (256, 0)]
    """
    powers = [1 << i for i in range(4, 9)]
    sums = [(a + b, b > 0, a, b) for a in powers for b in (0, *powers) if b < a and a + b >= dim]
    return min(sums)[2:]


_MEASURED = {
    BLOCK: {
        64: Config((64, 0), (64, 0), 4, in_turns=True), 96: Config((128, 0), (128, 0), 2),
        128: Config((128, 0), (128, 0), 2),
    },
    SMALL: {
        64: Config((64, 0), (64, 0), 4, SMALL, 2, kept=1), 96: Config((128, 0), (128, 0), 2, SMALL, 2, kept=1),
        128: Config((128, 0), (128, 0), 2, SMALL, 2, kept=1),
    },
}  # fmt: skip
_BACKWARD = {
    32: BackwardConfig(32, 128, 2, 2), 64: BackwardConfig(64, 128, 2, 2), 128: BackwardConfig(128, 64, 3, 2),
}  # fmt: skip
WIDEST_BACKWARD = 128  # of the kernel with tiles of 128 keys
WIDE_KEYS = 64  # of an item of the kernel for wider heads


def wide_config_for(head_dim: int, value_dim: int) -> WideConfig | None:
    """The configuration of the backward for wide heads; None for others.

    >>> wide_config_for(192, 128)[:2], wide_config_for(128, 128)
    ((256, 128), None)
    """
    if max(head_dim, value_dim) <= WIDEST_BACKWARD:
        return None
    dims = max(64, padded(head_dim)), max(64, padded(value_dim))
    return WideConfig(*dims, chunks=4 if min(dims) == 256 else 2)


@bounded(256)
def config_for(head_dim: int, tile: tuple[int, int], value_dim: int | None = None) -> Config:
    """The configuration of the forward for head dims up to WIDEST, in the tiles that `tile_for` says.

    >>> config_for(96, BLOCK).dims, config_for(80, BLOCK).dims, config_for(192, BLOCK, 128).v_dims
    ((128, 0), (64, 16), (128, 0))
    """
    if value_dim in (None, head_dim) and head_dim in HEAD_DIMS:
        return _MEASURED[tile][head_dim]
    return next(each for each in _tried(head_dim, value_dim or head_dim, tile) if each.shared_memory <= SHARED_MEMORY)


def _tried(head_dim: int, value_dim: int, tile: tuple[int, int]) -> Iterator[Config]:
    """Configurations for any head dims, not measured on a GPU, the most wanted first: many keys, and queries ahead."""
    dims, v_dims = pieces_of(head_dim), pieces_of(value_dim)
    if tile == SMALL:
        base = Config(dims, v_dims, 0, SMALL, 2, kept=2 if dims[1] else 1)
    else:
        base = Config(dims, v_dims, 0, in_turns=max(sum(dims), sum(v_dims)) <= 64)
    # Sums of values, scores and weights share the registers: 128 + 64 + 32 of a thread would be too many.
    splits = (1, 2) if sum(v_dims) <= 192 and tile == BLOCK else (2,) if tile == BLOCK else (1,)
    for split in splits:
        for q_buffers, out_pieces in ((2, 1), (1, 1), (1, 2)):
            for stages in (4, 3, 2):
                yield base._replace(split=split, q_buffers=q_buffers, out_pieces=out_pieces, stages=stages)


def tile_for(block: tuple[int, int], dims: tuple[int, int] = (64, 64)) -> tuple[int, int]:
    """The tiles that the forward walks of a mask in such blocks. dims: D and Dv, of which wide ones leave no room for
    two streams.

    >>> tile_for((64, 64)), tile_for((32, 128)), tile_for((64, 64), (192, 128))
    ((64, 64), (128, 128), (128, 128))
    """
    return SMALL if block == SMALL and max(dims) <= 128 else BLOCK


def backward_config_for(head_dim: int, value_dim: int = 0) -> BackwardConfig:
    """The configuration of the backward for head dims up to WIDEST_BACKWARD.

    >>> backward_config_for(96).dim, backward_config_for(16, 48).dim
    (128, 64)
    """
    return _BACKWARD[max(32, padded(max(head_dim, value_dim)))]

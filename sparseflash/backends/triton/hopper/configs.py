"""How the kernels for Hopper are built for a head dim. Every configuration here is compiled by a test."""

from __future__ import annotations

from typing import NamedTuple

ROWS = 64  # queries of a warpgroup in the forward, which is what a matrix instruction takes
GROUPS = 2  # warpgroups that multiply
CHANNELS = 16  # of queries and keys that a matrix instruction takes
BLOCK = (GROUPS * ROWS, 128)  # queries and keys of a tile
SMALL = (ROWS, 64)  # of masks in such blocks, in the forward
HEAD_DIMS = (64, 96, 128)
# Scores of -inf times a scale that is 0 in fp32 would be NaN. For smaller scales this is as good: 2 to the power of a
# score of 1e9 times it is 1. (`attention` gives its kernels none below 1e-20.)
SMALLEST_SCALE = 1e-30
# In units of log2(e), a sum of so much is known to a few powers of 2 only. Biases may be as low as fp32 holds.
COARSE = 2.0**26


class Config(NamedTuple):
    """What the forward kernel takes besides its arguments."""

    dim: int  # of the tiles; what a head has less is zeros
    stages: int  # of keys and values of a stream, 2 * tile[1] * dim numbers each
    tile: tuple[int, int] = BLOCK
    streams: int = 1  # of items, each with its own warpgroups
    q_buffers: int = 2  # of a stream
    registers: int = 240  # a thread of the warpgroups
    loader_registers: int = 24
    # What each thread has when the kernel starts: 384 threads of 168 are all that there are.
    start_registers: int = 168

    @property
    def groups(self) -> int:
        """The warpgroups that share an item."""
        return self.tile[0] // ROWS

    def with_biases(self) -> Config:
        """The same where biases, of keys or of pairs, take the place of queries that are loaded ahead."""
        return self._replace(q_buffers=1) if self.dim == 128 else self


class BackwardConfig(NamedTuple):
    """What the backward kernel takes besides its arguments."""

    dim: int
    rows: int  # queries of a step
    q_stages: int  # of queries, rows * dim numbers each
    dout_stages: int
    registers: int = 24  # a thread of the warps that load and send; the warpgroups get what is left
    start_registers: int = 168

    def with_pairs(self) -> BackwardConfig:
        """The same where a bias of pairs takes the place of queries that are loaded ahead."""
        return self._replace(q_stages=2)


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

_CONFIGS = {
    BLOCK: {64: Config(64, 4), 96: Config(128, 2), 128: Config(128, 2)},
    SMALL: {64: Config(64, 4, SMALL, 2), 96: Config(128, 2, SMALL, 2), 128: Config(128, 2, SMALL, 2)},
}
_BACKWARD = {64: BackwardConfig(64, 128, 2, 2), 96: BackwardConfig(128, 64, 3, 2), 128: BackwardConfig(128, 64, 3, 2)}


def config_for(head_dim: int, tile: tuple[int, int]) -> Config:
    """The configuration of the forward for one of HEAD_DIMS, in the tiles that `tile_for` says.

    >>> config_for(96, BLOCK).dim
    128
    """
    return _CONFIGS[tile][head_dim]


def tile_for(block: tuple[int, int]) -> tuple[int, int]:
    """The tiles that the forward walks of a mask in such blocks.

    >>> tile_for((64, 64)), tile_for((32, 128))
    ((64, 64), (128, 128))
    """
    return SMALL if block == SMALL else BLOCK


def backward_config_for(head_dim: int) -> BackwardConfig:
    """The configuration of the backward for one of HEAD_DIMS."""
    return _BACKWARD[head_dim]

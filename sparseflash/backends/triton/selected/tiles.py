"""The sizes of tiles of the kernels for chosen tokens, from head dims, dtype and the GPU's shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MOST_HEADS = 256  # that share a key head
MOST_DIM = 576
MOST_DIM_OF_FP32 = 256  # its products are of three pieces a number, which more columns would not leave in registers
_MOST_ROWS = 64  # of a tile of heads
# Keys at a time and stages, the best first, as measured on an H200. More stages of fewer keys are not measured.
STEPS = ((64, 3), (64, 2), (32, 2), (16, 2), (16, 1))


@dataclass(frozen=True)
class Shape:
    """Triton identifies it by its text, in which a dataclass has all its fields."""

    LOW: int  # columns of queries and keys in the first piece, and in the second
    HIGH: int
    PADDED_LOW: int
    PADDED_HIGH: int
    DV: int
    PADDED_DV: int
    ROWS: int  # heads of a tile
    TILES: int  # tiles of a group of heads
    BLOCK_N: int  # chosen keys at a time
    KEEP: bool  # as in the portable kernels: maxima are kept unscaled and sums inverted
    PRECISION: str
    FAR: bool  # offsets of tokens need 64 bits


def power(number: int, least: int = 16) -> int:
    """The smallest power of two that is at least `number` and `least`."""
    return max(least, 1 << (number - 1).bit_length())


def pieces(dim: int) -> tuple[int, int]:
    """The padded sizes of the pieces of a head dim, the second 0 if there is only one.

    >>> [pieces(dim) for dim in (128, 576, 192, 96, 100, 8)]
    [(128, 0), (512, 64), (128, 64), (64, 32), (128, 0), (16, 0)]
    """
    whole = power(dim)
    low = whole // 2
    if whole == dim or low < 16:
        return whole, 0
    high = power(dim - low)
    return (low, high) if high < low else (whole, 0)


def shares_values(dim: int, v_dim: int) -> bool:
    """Whether the first piece of a key is its value, so that a key is gathered once for both."""
    return pieces(dim)[0] == v_dim <= dim


def shape_of(
    dim: int, v_dim: int, group: int, *, size: int, keep: bool, precision: str, shared: bool, backward: bool,
    far: bool, memory: int, scores: bool = False,
) -> tuple[Shape, int, int]:  # fmt: skip
    """`(shape, warps, stages)`.

    scores: the kernel writes scores, in fp32, which pass through shared memory.
    """
    low, high = pieces(dim)
    padded_v = power(v_dim)
    rows, block_n, stages = _fitting(
        low + high, padded_v, power(group), size, shared, backward, memory, 4 if scores else size
    )  # fmt: skip
    shape = Shape(
        min(low, dim), max(0, dim - low) if high else 0, low, high, v_dim, padded_v, rows, -(-group // rows), block_n,
        keep, precision, far,
    )  # fmt: skip
    return shape, 8 if not backward and rows * padded_v > 64 * 256 else 4, stages


def _fitting(
    padded: int, padded_v: int, heads: int, size: int, shared: bool, backward: bool, memory: int, of_score: int
) -> tuple[int, int, int]:
    """`(rows, keys at a time, stages)`: the largest that fit into shared memory."""
    # fp32 is multiplied in pieces, which are in registers.
    most, steps = (_MOST_ROWS, 64) if size == 2 else (32, 32) if max(padded, padded_v) <= 128 else (16, 16)
    for rows in (each for each in (64, 32, 16) if each <= min(most, heads)):
        for block_n, stages in STEPS:
            if block_n > steps:
                continue
            gathered = block_n * (padded + (0 if shared else padded_v))
            held = rows * (padded + (padded_v if backward else 0))
            if (held + stages * gathered) * size + rows * block_n * of_score <= memory:
                return rows, block_n, stages
    return 16, 16, 1


class Tile(NamedTuple):
    """A tile of a product of the backward."""

    heads: int
    tiles: int  # of heads
    tokens: int
    columns: int  # at most
    stages: int

    def warps(self, columns: int) -> int:
        return 8 if max(self.heads, self.tokens) * columns > 64 * 128 else 4


def dq_tile(group: int, size: int) -> Tile:
    """The tile of dq: heads by columns, summed over tokens."""
    heads = min(power(group), 128 if size == 2 else 32)
    return Tile(heads, -(-group // heads), *((64, 256) if size == 2 else (16, 64)), stages=3)


def rows_tile(group: int, size: int) -> Tile:
    """The tile of the rows of tokens: tokens by columns, summed over all heads of a group."""
    heads = power(group)
    # Of 128 heads, a second stage would leave a multiprocessor room for one program: 1.36 times the time on an H200.
    stages = 1 if heads > 64 and size == 2 else 2
    return Tile(heads, 1, *((64, 128 if heads <= 128 else 64) if size == 2 else (16, 32)), stages=stages)

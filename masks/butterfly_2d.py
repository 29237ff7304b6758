"""The butterfly of an image: the Kronecker product of a butterfly over its rows and one over its columns."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, block_pair, integer, token_counts
from sparseflash.blockmask.unique import distinct
from sparseflash.limits import COUNT
from sparseflash.masks.butterfly import partners, powers
from sparseflash.masks.tiling.arguments import at_least
from sparseflash.masks.tiling.kinds import by_kind
from sparseflash.masks.tiling.signatures import pattern

Pair = int | tuple[int, int]


@pattern
def butterfly_2d(
    height: int, width: int, *, cell: Pair = 1, factors: Pair | None = None, radix: int = 2, block: Block = 128
) -> BlockMask:
    """A butterfly over the rows of an image and one over its columns: a query sees the pixels whose row and column are
    both linked to its own.

    >>> butterfly_2d(128, 128, cell=(1, 128)) == butterfly_2d(128, 128, factors=(7, 0), cell=(1, 128))
    True

    The tokens are the pixels, row by row: token q is pixel `(q // width, q % width)`. Let `a ~ b` iff a and b, written
    in base `radix`, are equal or differ in a single digit, which is one of the lowest `factors`. Then score (q, k) is
    live iff

        q // width // cell_h ~ k // width // cell_h   and   q % width // cell_w ~ k % width // cell_w

    The pixels of a cell are one node of the butterfly and see the same keys; a query sees `(1 + log2(height / cell_h))
    (1 + log2(width / cell_w)) cell_h cell_w` pixels. If a side is not a power of the radix, partners past the edge are
    dropped.

    In `butterfly(height * width)` a link changes the row or the column; here it may change both. Source: the 2D form of
    Pixelated Butterfly's code (HazyResearch/fly, mlp.py: `kron` of two flat butterflies). It has no causal form.

    Row by row a tile covers few rows of the image, so most tiles are partial unless a cell is as wide as a block:
    `cell=(1, block)`. In the order of cells (`permute`) the tiles follow the product.

    Args:
        height, width: pixels.
        radix: the base of the digits.
        factors: the number of the lowest strides that are kept, one number or `(rows, columns)`; by default all.
        cell: pixels, one number or `(cell_h, cell_w)`.
        block: tokens per side of a tile.

    Raises ValueError if a side or cell is not positive, `radix` is below 2, or `factors` is negative or larger than the
    number of strides of a side.

        2 x 4 pixels       4 x 2 pixels, 1 factor
        X X X . X X X .    X X X X . . . .
        X X . X X X . X    X X X X . . . .
        X . X X X . X X    X X X X . . . .
        . X X X . X X X    X X X X . . . .
        X X X . X X X .    . . . . X X X X
        X X . X X X . X    . . . . X X X X
        X . X X X . X X    . . . . X X X X
        . X X X . X X X    . . . . X X X X

    >>> butterfly_2d(128, 128)
    BlockMask(16384 x 16384, blocks of 128, 1024 tiles: 0 full + 1024 partial (1 distinct), density 0.391 %)
    """
    height, width = at_least(1, height, "height", "pixels"), at_least(1, width, "width", "pixels")
    q_len, _ = token_counts(height * width, height * width)
    radix = min(at_least(2, radix, "radix", ""), max(height, width, 2))
    cell_h, cell_w = (at_least(1, side, "cell", "pixels") for side in _pair(cell, "cell"))
    cell_h, cell_w = min(cell_h, height), min(cell_w, width)
    wanted = (None, None) if factors is None else _pair(factors, "factors")
    row_strides = _lowest(-(-height // cell_h), radix, wanted[0], "rows")
    col_strides = _lowest(-(-width // cell_w), radix, wanted[1], "columns")
    block_q, block_k = block_pair(block)

    def rows_related(a: Tensor, b: Tensor) -> Tensor:
        return _related(a // cell_h, b // cell_h, row_strides, radix)

    def cols_related(a: Tensor, b: Tensor) -> Tensor:
        return _related(a // cell_w, b // cell_w, col_strides, radix)

    # Candidates: pairs of related rows of the image, and in those, pairs of related runs of at most a block of pixels.
    r, r_other = _expanded(*partners(-(-height // cell_h), row_strides, radix, False), height, cell_h)
    c, c_other = _expanded(*partners(-(-width // cell_w), col_strides, radix, False), width, cell_w)
    runs_k = -(-width // block_k)
    runs = distinct(c // block_q * runs_k + c_other // block_k)[0]
    first_q, first_k = runs // runs_k * block_q, runs % runs_k * block_k
    # A run starts and ends in different tiles where the rows of the image do not start with a tile.
    ends_q = (0,) if width % block_q == 0 else (0, block_q - 1)
    ends_k = (0,) if width % block_k == 0 else (0, block_k - 1)
    col_blocks = -(-q_len // block_k)
    keys = []
    for end_q in ends_q:
        i = (r[:, None] * width + (first_q + end_q).clamp(max=width - 1)) // block_q  # [row pairs, run pairs]
        for end_k in ends_k:
            j = (r_other[:, None] * width + (first_k + end_k).clamp(max=width - 1)) // block_k
            keys.append(distinct((i * col_blocks + j).reshape(-1))[0])
    key = keys[0] if len(keys) == 1 else distinct(torch.cat(keys))[0]
    rows = key // col_blocks
    # Divisions of shorter numbers are faster. No number below exceeds 3 * q_len + 256.
    short = torch.int32 if q_len < COUNT // 4 else torch.int64
    rows, cols = rows.to(short), (key - rows * col_blocks).to(short)

    row_q, row_k = rows * block_q // width, cols * block_k // width
    rows_q, rows_k = ((b + width - 2) // width + 1 for b in (block_q, block_k))
    codes = [rows * block_q % width, cols * block_k % width]
    for some in torch.cartesian_prod(torch.arange(rows_q, device="cpu"), torch.arange(rows_k, device="cpu")).split(31):
        code = torch.zeros_like(rows, dtype=torch.int64)
        for bit, (a, b) in enumerate(some.tolist()):
            inside = ((row_q + a) * width < (rows + 1) * block_q) & ((row_k + b) * width < (cols + 1) * block_k)
            code |= (inside & rows_related(row_q + a, row_k + b)).long() << bit
        codes.append(code)

    def live(some: Tensor) -> Tensor:
        q = rows[some][:, None, None] * block_q + torch.arange(block_q, device="cpu")[:, None]
        k = cols[some][:, None, None] * block_k + torch.arange(block_k, device="cpu")
        # In int32, because moving these numbers is most of the work.
        (row_q, col_q), (row_k, col_k) = (((x // width).int(), (x % width).int()) for x in (q, k))
        return rows_related(row_q, row_k) & cols_related(col_q, col_k)

    return by_kind(live, rows, cols, codes, q_len, block=(block_q, block_k))


def _pair(value: object, name: str) -> tuple[int, int]:
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"{name} must be a number or a pair of them; got {value!r}.")
    unit = "pixels" if name == "cell" else "strides"
    return integer(pair[0], name, unit), integer(pair[1], name, unit)


def _lowest(count: int, radix: int, factors: int | None, side: str) -> list[int]:
    there = powers(count, radix)
    factors = len(there) if factors is None else factors
    if not 0 <= factors <= len(there):
        raise ValueError(f"factors must lie between 0 and {len(there)} for {count} {side} of cells; got {factors}.")
    return there[:factors]


def _related(a: Tensor, b: Tensor, strides: list[int], radix: int) -> Tensor:
    """Whether nodes are equal or differ in the digit of one of the strides, the lowest powers of the radix."""
    if radix == 2:
        differ = a ^ b
        return (differ & (differ - 1) == 0) & (differ < 1 << len(strides))
    found = a == b
    for s in strides:
        found = found | ((a // (s * radix) == b // (s * radix)) & (a % s == b % s))
    return found


def _expanded(a: Tensor, b: Tensor, length: int, cell: int) -> tuple[Tensor, Tensor]:
    inside = torch.arange(cell, device="cpu")
    first = (a[:, None, None] * cell + inside[:, None]).expand(-1, cell, cell).reshape(-1)
    second = (b[:, None, None] * cell + inside).expand(-1, cell, cell).reshape(-1)
    exists = (first < length) & (second < length)
    return first[exists], second[exists]

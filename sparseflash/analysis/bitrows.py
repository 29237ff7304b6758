"""Boolean matrices with one bit per entry, so that 8192 x 8192 entries take 8 MB.

A matrix of n columns is uint64 `[rows, ceil(n / 64)]`; entry j of a row is bit `j % 64` of word `j // 64`, and bits
past n are 0. Words are little-endian, so that the bytes of a row hold its bits in order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]
Index = NDArray[np.int64]

WORD = 64
_LITTLE = np.dtype("<u8")
_AT_ONCE = 1 << 24  # bytes of unpacked bits


def zeros(rows: int, cols: int) -> Bits:
    """The matrix without any entry set."""
    return np.zeros((rows, -(-cols // WORD)), dtype=_LITTLE)


def of_pairs(rows: Index, cols: Index, count: int, width: int) -> Bits:
    """The `count x width` matrix with these entries set; they may be in any order."""
    bits = zeros(count, width)
    if len(rows):
        where, word = np.divmod(np.unique(rows * width + cols), width)
        key = where * bits.shape[1] + word // WORD
        starts = np.flatnonzero(np.diff(key, prepend=-1))
        values = np.left_shift(np.uint64(1), (word % WORD).astype(np.uint64))
        bits.reshape(-1)[key[starts]] = np.bitwise_or.reduceat(values, starts)
    return bits


def below(count: int) -> Bits:
    """The square matrix with every entry below the diagonal set."""
    bits = zeros(count, count)
    for row in range(count):
        bits[row, : row // WORD] = np.iinfo(np.uint64).max
        if row % WORD:
            bits[row, row // WORD] = (1 << row % WORD) - 1
    return bits


def unpack(bits: Bits, width: int) -> NDArray[np.bool_]:
    """Bool `[rows, width]`."""
    return np.unpackbits(bits.view(np.uint8), axis=1, count=width, bitorder="little").view(np.bool_)


def pack(dense: NDArray[np.bool_]) -> Bits:
    """The inverse of `unpack`."""
    packed = np.packbits(dense, axis=1, bitorder="little")
    padded = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8)))
    return np.ascontiguousarray(padded).view(_LITTLE)


def pairs(bits: Bits, width: int) -> tuple[Index, Index]:
    """The entries that are set, ordered by rows, then columns."""
    step = max(1, _AT_ONCE // max(width, 1))
    rows, cols = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for first in range(0, len(bits), step):
        chunk = bits[first : first + step]
        row, word = np.nonzero(chunk)  # most words of typical matrices are 0
        at, bit = np.nonzero(unpack(chunk[row, word][:, None], WORD))
        rows.append(row[at] + first)
        cols.append(word[at] * WORD + bit)
    return np.concatenate(rows), np.concatenate(cols)


def transpose(bits: Bits, width: int) -> Bits:
    """The `width x rows` matrix; computed 64 rows at a time, which stay in the cache."""
    result = zeros(width, len(bits))
    for first in range(0, len(bits), WORD):
        result[:, first // WORD] = pack(np.ascontiguousarray(unpack(bits[first : first + WORD], width).T))[:, 0]
    return result


def counts(bits: Bits, width: int) -> Index:
    """The number of entries set in each row."""
    step = max(1, _AT_ONCE // max(width, 1))
    found = [np.count_nonzero(unpack(bits[r : r + step], width), axis=1) for r in range(0, len(bits), step)]
    return np.concatenate([np.zeros(0, np.int64), *found])


def count(bits: Bits, width: int) -> int:
    """The number of entries set."""
    return int(counts(bits, width).sum())


def product(a: Bits, b: Bits) -> Bits:
    """The boolean product: entry (i, j) is set iff some k has a[i, k] and b[k, j]; `len(b)` is the width of a."""
    inner = len(b)
    result = np.zeros((len(a), b.shape[1]), dtype=_LITTLE)
    a = a & pack(np.asarray(b.any(axis=1)).reshape(1, -1))  # empty rows of b contribute nothing
    set_in_row = counts(a, inner)
    many = set_in_row > inner // 16 + 16  # from here on the tables pay off
    few = np.flatnonzero((set_in_row > 0) & ~many)
    _, chosen = pairs(a[few], inner)
    for i, rows in zip(few, np.split(chosen, np.cumsum(set_in_row[few])[:-1]), strict=False):
        np.bitwise_or.reduce(b[rows], axis=0, out=result[i])
    if many.any():
        result[many] = _product_by_tables(a[many], b)
    return result


def meet(a: Bits, b: Bits, rows_a: Index, rows_b: Index) -> NDArray[np.bool_]:
    """Whether row `rows_a[e]` of a and row `rows_b[e]` of b have an entry in common: bool `[E]`. Both have one
    width.
    """
    found = np.zeros(len(rows_a), np.bool_)
    step = max(1, _AT_ONCE // (8 * max(a.shape[1], 1)))
    for first in range(0, len(rows_a), step):
        both = a[rows_a[first : first + step]] & b[rows_b[first : first + step]]
        both.any(axis=1, out=found[first : first + step])
    return found


def _product_by_tables(a: Bits, b: Bits) -> Bits:
    """The product by the method of the four Russians: a table of all unions of eight rows of b serves every row of a.

    Takes an eighth of the work of the plain product, whatever a contains.
    """
    by_byte = np.ascontiguousarray(a.view(np.uint8).T)  # [inner / 8, rows]
    result = np.zeros((len(a), b.shape[1]), dtype=_LITTLE)
    table = np.zeros((256, b.shape[1]), dtype=_LITTLE)
    rows = max(1, (1 << 18) // max(b.shape[1], 1))  # chunks of 2 MB of the result stay in the cache
    buffer = np.empty((min(rows, len(a)), b.shape[1]), dtype=_LITTLE)
    for group, first in enumerate(range(0, len(b), 8)):
        size = 1
        for row in b[first : first + 8]:
            np.bitwise_or(table[:size], row, out=table[size : 2 * size])
            size *= 2
        for start in range(0, len(a), rows):
            part = result[start : start + rows]
            np.take(table, by_byte[group, start : start + rows], axis=0, out=buffer[: len(part)], mode="clip")
            np.bitwise_or(part, buffer[: len(part)], out=part)
    return result

"""Boolean matrices with one bit per entry, so that 8192 x 8192 entries take 8 MB.

A matrix of n columns is uint64 `[rows, ceil(n / 64)]`, little-endian: entry j of a row is bit `j % 64` of word
`j // 64`; bits past n are 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]
Index = NDArray[np.int64]

WORD = 64
_LITTLE = np.dtype("<u8")
_AT_ONCE = 1 << 24  # bytes of unpacked bits
_WORDS_AT_ONCE = 1 << 17  # uint64 words of a product, 1 MB, which stay in the cache with the look-up table


def zeros(rows: int, cols: int) -> Bits:
    """The matrix without any entry set."""
    return np.zeros((rows, -(-cols // WORD)), dtype=_LITTLE)


def of_pairs(rows: Index, cols: Index, count: int, width: int) -> Bits:
    """The `count x width` matrix with these entries set."""
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
    """The `width x rows` matrix, computed 64 rows at a time, which stay in the cache.

    A square of 64 x 64 bits exchanges two of its quarters, then each quarter two of its own, down to single bits
    (Warren, Hacker's Delight, section 7-3).
    """
    words = bits.shape[1]
    result = zeros(words * WORD, len(bits))
    by_word = result.reshape(words, WORD, -1)
    for first in range(0, len(bits), WORD):
        rows = np.zeros((WORD, words), dtype=_LITTLE)
        rows[: len(bits) - first] = bits[first : first + WORD]
        for half in (32, 16, 8, 4, 2, 1):
            low = np.uint64(sum(((1 << half) - 1) << start for start in range(0, WORD, 2 * half)))
            upper, lower = np.moveaxis(rows.reshape(-1, 2, half, words), 1, 0)
            changed = ((upper >> np.uint64(half)) ^ lower) & low
            lower ^= changed
            upper ^= changed << np.uint64(half)
        by_word[:, :, first // WORD] = rows.T
    return result[:width]


def counts(bits: Bits, width: int) -> Index:
    """The number of entries set in each row."""
    step = max(1, _AT_ONCE // max(width, 1))
    found = [np.count_nonzero(unpack(bits[r : r + step], width), axis=1) for r in range(0, len(bits), step)]
    return np.concatenate([np.zeros(0, np.int64), *found])


def count(bits: Bits, width: int) -> int:
    """The number of entries set."""
    return int(counts(bits, width).sum())


def product(a: Bits, b: Bits) -> Bits:
    """The boolean product: entry (i, j) is set iff some k has a[i, k] and b[k, j]; `len(b)` is the width of a.

    Long runs of bits, as in windows, cost little more than their ends.
    """
    levels = [(a, b)]
    while (whole := (bits := levels[-1][0].view(np.uint8))[:, : len(b) // 8] == 255).any():
        rest = bits.copy()
        rest[:, : len(b) // 8][whole] = 0
        levels[-1] = rest.view(_LITTLE), b
        b = np.bitwise_or.reduce(b[: len(b) // 8 * 8].reshape(-1, 8, b.shape[1]), axis=1)
        levels.append((pack(whole), b))
    result = np.zeros((len(a), b.shape[1]), dtype=_LITTLE)
    for bits_of_level, rows in reversed(levels):  # the largest unions first, as they may leave nothing to add
        _add_product(result, bits_of_level, rows)
    return result


def meet(a: Bits, b: Bits, rows_a: Index, rows_b: Index) -> NDArray[np.bool_]:
    """Whether row `rows_a[e]` of a and row `rows_b[e]` of b, of equal width, share an entry: bool `[E]`."""
    found = np.zeros(len(rows_a), np.bool_)
    step = max(1, _AT_ONCE // (8 * max(a.shape[1], 1)))
    for first in range(0, len(rows_a), step):
        both = a[rows_a[first : first + step]] & b[rows_b[first : first + step]]
        both.any(axis=1, out=found[first : first + step])
    return found


def _add_product(result: Bits, a: Bits, b: Bits) -> None:
    """Adds the product to `result`, 64 rows of b at a time. Rows that equal the union of b's rows are looked for after
    1, 2, 4, ... steps, because a look reads the whole result, and left out if they are more than half.
    """
    every = np.bitwise_or.reduce(b, axis=0)
    where, taken, part, by_word = np.arange(len(a)), 0, result, np.ascontiguousarray(a.T)
    for word, first in enumerate(range(0, len(b), WORD)):
        rows = np.flatnonzero(by_word[word])
        if not len(rows):
            continue
        _add_unions(part, rows, by_word[word, rows, None], b[first : first + WORD])
        taken += 1
        if taken & (taken - 1) == 0:
            open_ = (part != every).any(axis=1)
            if 2 * np.count_nonzero(open_) < len(part):
                result[where] = part
                where = where[open_]
                part, by_word = result[where], np.ascontiguousarray(by_word[:, open_])
    result[where] = part


def _add_unions(part: Bits, rows: Index, chosen: Bits, b: Bits) -> None:
    """Adds to `part[rows[e]]` the rows of b whose bits are set in `chosen[e]`. By the method of the four Russians: a
    table of all unions of eight rows of b serves every row.
    """
    table = np.zeros((256, b.shape[1]), dtype=_LITTLE)
    step = max(1, _WORDS_AT_ONCE // max(b.shape[1], 1))
    by_byte = np.ascontiguousarray(chosen.view(np.uint8).T)
    for byte, first in zip(by_byte, range(0, len(b), 8), strict=False):
        at = np.flatnonzero(byte)
        if not len(at):
            continue
        size = 1
        for row in b[first : first + 8]:
            np.bitwise_or(table[:size], row, out=table[size : 2 * size])
            size *= 2
        if len(rows) == len(part) and 2 * len(at) > len(part):
            for some in range(0, len(part), step):
                part[some : some + step] |= table[byte[some : some + step]]
        else:
            for some in range(0, len(at), step):
                here = at[some : some + step]
                part[rows[here]] |= table[byte[here]]

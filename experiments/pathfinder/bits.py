"""Sets of pixels as bits: 64 pixels of a row in a word, the first in the lowest bit; the words of a column are
adjacent.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.pathfinder.compiled import compiled
from experiments.pathfinder.rng import ONE
from experiments.pathfinder.stamps import UNIT

OCCUPIED = ceil(0.3 * UNIT)  # counts as occupied
ALL = ~np.uint64(0)
# Collects eight 0/1 bytes as the bits of the highest byte.
BYTES_TO_BITS = np.uint64(0x0102040810204080)


class Scratch(NamedTuple):
    """For a square of `size` pixels, with W words in a row."""

    row: NDArray[np.uint8]  # [64 W]
    occupied: NDArray[np.uint64]  # [W, size]
    taken: NDArray[np.uint64]  # [W, size]
    whole: NDArray[np.uint64]  # [W], existing pixels


@compiled
def scratch_for(size):
    words = (size + 63) // 64
    whole = np.full(words, ALL)
    if size % 64:
        whole[words - 1] = (ONE << np.uint64(size % 64)) - ONE
    occupied, taken = np.empty((words, size), np.uint64), np.empty((words, size), np.uint64)
    return Scratch(np.zeros(64 * words, np.uint8), occupied, taken, whole)


@compiled
def pack(mask, row, occupied):
    """Write pixels of at least OCCUPIED as bits; returns the number of the others. row: 0 past the last pixel."""
    words, size = occupied.shape
    eights = row.view(np.uint64)
    free = 0
    for y in range(size):
        here = mask[y]
        for x in range(size):
            row[x] = here[x] >= OCCUPIED
            free += here[x] < OCCUPIED
        for word in range(words):
            bits = np.uint64(0)
            for eight in range(8):
                byte = (eights[8 * word + eight] * BYTES_TO_BITS) >> np.uint64(56)
                bits |= byte << np.uint64(8 * eight)
            occupied[word, y] = bits
    return free


@compiled
def gather(bits, kernel, found):
    """found |= bits shifted by every (dy, dx) of a kernel, int64 [k, 2]: pixel (y, x) reads (y + dy, x + dx) if it lies
    inside.

    Word by word, so that the columns of words stay in the nearest cache.
    """
    words, size = bits.shape
    for word in range(words):
        for pixel in range(len(kernel)):
            dy, dx = kernel[pixel, 0], kernel[pixel, 1]
            first = max(0, -dy)
            last = max(first, min(size, size - dy))
            low, within = word + (dx >> 6), np.uint64(dx & 63)
            here = found[word, first:last]
            if 0 <= low < words:
                there = bits[low, first + dy : last + dy]
                for y in range(len(here)):
                    here[y] |= there[y] >> within
            if within and 0 <= low + 1 < words:
                there = bits[low + 1, first + dy : last + dy]
                for y in range(len(here)):
                    here[y] |= there[y] << (np.uint64(64) - within)


@compiled
def ones(bits):
    bits -= (bits >> ONE) & np.uint64(0x5555555555555555)
    bits = (bits & np.uint64(0x3333333333333333)) + ((bits >> np.uint64(2)) & np.uint64(0x3333333333333333))
    bits = (bits + (bits >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((bits * np.uint64(0x0101010101010101)) >> np.uint64(56))


@compiled
def place_of(bits, number):
    for _ in range(number):
        bits &= bits - ONE
    place = 0
    while not bits & ONE:
        bits >>= ONE
        place += 1
    return place

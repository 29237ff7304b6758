"""Sets of pixels as bits, beside the same with one byte a pixel."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from experiments.pathfinder.bits import OCCUPIED, gather, ones, pack, place_of, scratch_for


def unpacked(words, size):
    """bool [size, size]"""
    bits = (words[:, :, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)  # [W, size, 64]
    return bits.transpose(1, 0, 2).reshape(size, -1)[:, :size].astype(bool)


@given(size=st.integers(2, 150), dy=st.integers(-30, 30), dx=st.integers(-140, 140), seed=st.integers(0, 99))
@example(size=128, dy=0, dx=64, seed=0)
@example(size=128, dy=-3, dx=-64, seed=0)
@example(size=130, dy=2, dx=-1, seed=0)
def test_pixels_are_packed_and_moved(size, dy, dx, seed):
    mask = np.random.default_rng(seed).integers(0, 2 * OCCUPIED, (size, size), np.int16)
    scratch = scratch_for(size)
    assert pack(mask, scratch.row, scratch.occupied) == (mask < OCCUPIED).sum()
    assert np.array_equal(unpacked(scratch.occupied, size), mask >= OCCUPIED)
    assert unpacked(np.repeat(scratch.whole[:, None], size, 1), size).all()
    assert not (scratch.occupied & ~scratch.whole[:, None]).any()

    expected = np.zeros((size, size), bool)
    y, x = np.nonzero(mask >= OCCUPIED)
    inside = (y - dy >= 0) & (y - dy < size) & (x - dx >= 0) & (x - dx < size)
    expected[y[inside] - dy, x[inside] - dx] = True
    scratch.taken[:] = 0
    gather(scratch.occupied, dy, dx, scratch.taken)
    assert np.array_equal(unpacked(scratch.taken, size), expected)


@given(bits=st.integers(1, 2**64 - 1), data=st.data())
@example(bits=2**64 - 1, data=None)
def test_bits_are_counted_and_found(bits, data):
    places = [place for place in range(64) if bits >> place & 1]
    assert ones(np.uint64(bits)) == len(places)
    number = len(places) - 1 if data is None else data.draw(st.integers(0, len(places) - 1))
    assert place_of(np.uint64(bits), number) == places[number]

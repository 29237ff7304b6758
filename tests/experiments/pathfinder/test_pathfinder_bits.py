import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from experiments.pathfinder.bits import OCCUPIED, gather, ones, pack, place_of, scratch_for


def unpacked(words, size):
    bits = (words[:, :, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    return bits.transpose(1, 0, 2).reshape(size, -1)[:, :size].astype(bool)


MOVES = st.tuples(st.integers(-30, 30), st.integers(-140, 140))


@given(size=st.integers(2, 150), kernel=st.lists(MOVES, min_size=1, max_size=5), seed=st.integers(0, 99))
@example(size=128, kernel=[(0, 64)], seed=0)
@example(size=128, kernel=[(-3, -64)], seed=0)
@example(size=130, kernel=[(2, -1), (0, 0)], seed=0)
@example(size=20, kernel=[(25, 0), (-20, 3)], seed=0)
def test_pixels_are_packed_and_moved(size, kernel, seed):
    mask = np.random.default_rng(seed).integers(0, 2 * OCCUPIED, (size, size), np.int16)
    scratch = scratch_for(size)
    assert pack(mask, scratch.row, scratch.occupied) == (mask < OCCUPIED).sum()
    assert np.array_equal(unpacked(scratch.occupied, size), mask >= OCCUPIED)
    assert unpacked(np.repeat(scratch.whole[:, None], size, 1), size).all()
    assert not (scratch.occupied & ~scratch.whole[:, None]).any()

    expected = np.zeros((size, size), bool)
    y, x = np.nonzero(mask >= OCCUPIED)
    for dy, dx in kernel:
        inside = (y - dy >= 0) & (y - dy < size) & (x - dx >= 0) & (x - dx < size)
        expected[y[inside] - dy, x[inside] - dx] = True
    scratch.taken[:] = 0
    gather(scratch.occupied, np.array(kernel), scratch.taken)
    assert np.array_equal(unpacked(scratch.taken, size), expected)


@given(bits=st.integers(1, 2**64 - 1), data=st.data())
@example(bits=2**64 - 1, data=None)
def test_bits_are_counted_and_found(bits, data):
    places = [place for place in range(64) if bits >> place & 1]
    assert ones(np.uint64(bits)) == len(places)
    number = len(places) - 1 if data is None else data.draw(st.integers(0, len(places) - 1))
    assert place_of(np.uint64(bits), number) == places[number]

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from experiments.pathfinder.rng import GOLDEN, below, bits64, stream

# SplitMix64 for the seed 1234567 (https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64).
SPLITMIX64 = [
    6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
]  # fmt: skip


def test_the_numbers_are_those_of_splitmix64():
    state = np.array([1234567, GOLDEN], np.uint64)
    assert [int(bits64(state)) for _ in SPLITMIX64] == SPLITMIX64


def test_streams_are_known():
    assert stream(0, 0, 0).tolist() == [6235967106033911276, 8332923745663622873]
    assert stream(1, 2, 3).tolist() == [8597342863095858086, 9827856235408481569]


@given(st.integers(0, 2**63 - 1), st.integers(1, 2**32))
def test_integers_stay_below_their_bound(seed, count):
    state = stream(seed, 0, 0)
    assert all(0 <= below(state, count) < count for _ in range(50))

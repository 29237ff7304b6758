import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.pathfinder.rng import GOLDEN, below, bits64, stream, uniform

# SplitMix64 for the seed 1234567 (https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64).
SPLITMIX64 = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def test_the_numbers_are_those_of_splitmix64():
    state = np.array([1234567, GOLDEN], np.uint64)
    assert [int(bits64(state)) for _ in SPLITMIX64] == SPLITMIX64


def test_streams_are_known():
    assert stream(0, 0, 0).tolist() == [6235967106033911276, 8332923745663622873]
    assert stream(1, 2, 3).tolist() == [8597342863095858086, 9827856235408481569]


def test_seed_kind_and_index_each_make_another_stream():
    streams = {tuple(stream(s, k, i).tolist()) for s in range(10) for k in range(10) for i in range(50)}
    assert len(streams) == 5000


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**32))
def test_increments_are_odd_so_that_no_stream_is_short(seed, kind, index):
    assert stream(seed, kind, index)[1] % 2 == 1


@given(st.integers(0, 2**63 - 1), st.integers(1, 2**32))
def test_integers_stay_below_their_bound(seed, count):
    state = stream(seed, 0, 0)
    assert all(0 <= below(state, count) < count for _ in range(50))


@pytest.mark.parametrize("count", [2, 7, 360])
def test_integers_are_even(count):
    state = stream(5, 0, 0)
    drawn = np.bincount([below(state, count) for _ in range(20_000)], minlength=count)
    expected = 20_000 / count
    excess = (((drawn - expected) ** 2 / expected).sum() - (count - 1)) / np.sqrt(2 * (count - 1))
    assert abs(excess) < 4


def test_numbers_are_even_and_without_one_after_another():
    state = stream(6, 0, 0)
    drawn = np.array([uniform(state) for _ in range(20_000)])
    assert drawn.min() >= 0 and drawn.max() < 1
    assert abs(drawn.mean() - 1 / 2) < 4 * np.sqrt(1 / 12 / len(drawn))
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 4 / np.sqrt(len(drawn))


def test_first_numbers_of_neighbouring_images_are_even():
    labels = np.array([below(stream(0, 1, index), 2) for index in range(20_000)])
    assert abs(labels.mean() - 1 / 2) < 4 * np.sqrt(1 / 4 / len(labels))
    assert abs(np.corrcoef(labels[:-1], labels[1:])[0, 1]) < 4 / np.sqrt(len(labels))

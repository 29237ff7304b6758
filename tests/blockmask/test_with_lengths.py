import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask
from tests.blockmask.mask_values import ARRAYS, MANY, MOST, assert_same, window
from tests.drawn.masks import block_masks


@MANY
@given(block_masks(MOST, batch=2, heads=3), st.data())
def test_what_lies_at_or_past_a_length_is_dead(mask, data):
    q_len, k_len = mask.q_len, mask.k_len
    stops = data.draw(st.lists(st.integers(0, 2 * MOST) | st.sampled_from([q_len, k_len]), min_size=2, max_size=2))
    bare = dataclasses.replace(mask, lengths=None)
    padded = mask.with_lengths(torch.tensor(stops))
    stop = torch.tensor(stops).view(2, 1, 1, 1)
    inside = (torch.arange(q_len).view(-1, 1) < stop) & (torch.arange(k_len) < stop)
    assert torch.equal(padded.to_dense(), bare.to_dense() & inside)
    assert padded.shape == (2, *mask.shape[1:])
    assert padded.lengths.tolist() == [[min(stop, n) for stop in stops] for n in (q_len, k_len)]
    padded.validate()


@MANY
@given(block_masks(MOST, batch=2, heads=3), st.data())
def test_queries_and_keys_may_have_lengths_of_their_own(mask, data):
    stops = st.lists(st.integers(0, MOST), min_size=2, max_size=2).map(torch.tensor)
    q_stops, k_stops = data.draw(st.none() | stops), data.draw(stops)
    padded = mask.with_lengths(q_lengths=q_stops, k_lengths=k_stops)
    inside = torch.arange(mask.k_len) < k_stops.view(2, 1, 1, 1)
    if q_stops is not None:
        inside = inside & (torch.arange(mask.q_len).view(-1, 1) < q_stops.view(2, 1, 1, 1))
    assert torch.equal(padded.to_dense(), dataclasses.replace(mask, lengths=None).to_dense() & inside)
    padded.validate()
    baked = padded.bake_lengths()
    assert baked.lengths is None and torch.equal(baked.to_dense(), padded.to_dense())
    assert torch.equal(padded.T.to_dense(), padded.to_dense().mT)


def test_one_number_is_short_for_two():
    mask = window()
    assert mask.with_lengths([20, 30]) == mask.with_lengths(q_lengths=[20, 30], k_lengths=[20, 30])
    assert hash(mask.with_lengths([20])) == hash(mask.with_lengths(q_lengths=[20], k_lengths=[20]))
    assert mask.with_lengths(k_lengths=[20]) != mask.with_lengths([20])


def test_lengths_that_do_not_fit_together_are_refused():
    mask = window()
    with pytest.raises(TypeError, match="lengths must be given alone: it sets q_lengths and k_lengths"):
        mask.with_lengths([3], k_lengths=[3])
    with pytest.raises(TypeError, match="must be given lengths, q_lengths or k_lengths; got none"):
        mask.with_lengths()
    with pytest.raises(ValueError, match=r"must have one batch size; got \[2\] and \[3\]"):
        mask.with_lengths(q_lengths=[3, 4], k_lengths=[3, 4, 5])
    with pytest.raises(ValueError, match=r"k_lengths must have shape \[B\]; got \[1, 1\]"):
        mask.with_lengths(k_lengths=torch.tensor([[3]]))


def test_new_lengths_replace_old_ones():
    mask = window().with_lengths(torch.tensor([3, 7, 9]))
    assert_same(mask.with_lengths(torch.tensor([20, 30])), window().with_lengths(torch.tensor([20, 30])))


def test_lengths_are_clamped_to_what_there_is():
    mask = BlockMask.dense(40, 60, block=16).with_lengths(torch.tensor([-5, 0, 50, 60, 61, 2**40]))
    assert mask.q_lengths.tolist() == [0, 0, 40, 40, 40, 40]
    assert mask.k_lengths.tolist() == [0, 0, 50, 60, 60, 60]
    square = BlockMask.dense(40, block=16).with_lengths(torch.tensor([-5, 0, 39, 41, 2**40]))
    assert square.lengths.tolist() == [[0, 0, 39, 40, 40]] * 2


def test_a_mask_with_lengths_shares_the_other_arrays():
    mask = window()
    padded = mask.with_lengths(torch.tensor([3]))
    assert all(getattr(padded, name) is getattr(mask, name) for name in ARRAYS[:-1])
    assert mask.lengths is None


def test_lengths_belong_to_the_mask_alone():
    given_lengths = torch.tensor([3, 40], dtype=torch.int32)
    mask = window().with_lengths(given_lengths)
    given_lengths.fill_(0)
    assert mask.lengths.tolist() == [[3, 40]] * 2


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64])
def test_lengths_may_be_of_any_integer_type(dtype):
    mask = BlockMask.dense(400, block=16).with_lengths(torch.tensor([7, 100], dtype=dtype))
    assert mask.lengths.dtype == torch.int32 and mask.lengths.tolist() == [[7, 100]] * 2
    mask.validate()


def test_lengths_may_be_strided():
    mask = BlockMask.dense(40, block=16)
    assert mask.with_lengths(torch.arange(6)[::2]).lengths.tolist() == [[0, 2, 4]] * 2
    assert mask.with_lengths(torch.tensor([5]).expand(3)).lengths.tolist() == [[5, 5, 5]] * 2


@pytest.mark.parametrize("given_lengths", [[7, 40], (7, 40), np.array([7, 40])], ids=["list", "tuple", "array"])
def test_lengths_may_be_a_list(given_lengths):
    assert_same(window().with_lengths(given_lengths), window().with_lengths(torch.tensor([7, 40])))


def test_giving_lengths_asks_the_device_nothing():
    mask = window().to("meta")
    with pytest.raises(RuntimeError):
        mask.indices.tolist()
    assert mask.with_lengths(torch.zeros(2, dtype=torch.int64, device="meta")).shape == (2, 1, 40, 40)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ([3.0, 4.0], TypeError, "lengths must be a list of integers; got torch.float32"),
        ([True], TypeError, "lengths must be a list of integers; got torch.bool"),
        ([[3]], TypeError, r"lengths must be a list of integers; got torch.int64 of shape \[1, 1\]"),
        (None, TypeError, "with_lengths must be given lengths, q_lengths or k_lengths; got none of them"),
        (3, TypeError, r"lengths must be a list of integers; got torch.int64 of shape \[\]"),
        (torch.tensor([3.0]), TypeError, "lengths must be an integer tensor; got torch.float32"),
        (torch.tensor([True]), TypeError, "lengths must be an integer tensor; got torch.bool"),
        (torch.tensor([3j]), TypeError, "lengths must be an integer tensor; got torch.complex64"),
        (torch.tensor(3), ValueError, r"lengths must have shape \[B\]; got \[\]"),
        (torch.tensor([[3]]), ValueError, r"lengths must have shape \[B\]; got \[1, 1\]"),
        (
            torch.ones(2, 40, dtype=torch.bool),
            ValueError,
            r"got \[2, 40\]. Of a mask \[B, N\] .* pass its \.sum\(-1\)\.",
        ),
        (torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, "on the mask's device cpu; got meta"),
    ],
)
def test_wrong_lengths_are_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        window().with_lengths(wrong)


def test_lengths_of_another_batch_are_refused():
    near = torch.eye(20, dtype=torch.bool)
    mask = BlockMask.from_dense(torch.stack([near, ~near])[:, None], block=16)
    with pytest.raises(ValueError, match=r"lengths must have shape \[2\]; got \[3\]"):
        mask.with_lengths(torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"lengths must have shape \[2\]; got \[1\]"):
        mask.with_lengths(torch.tensor([1]))

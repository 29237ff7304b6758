import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sparseflash import attention, masks
from sparseflash.masks import order
from tests.drawn.masks import SEEDS
from tests.masks.grids import orders, shapes

GRIDS = [(1,), (9,), (4, 4), (3, 5), (1, 7), (6, 6), (2, 3, 4), (4, 4, 4), (2, 2, 2, 3)]
CURVES = pytest.mark.parametrize("curve", [order.row_major, order.morton, order.hilbert], ids=lambda c: c.__name__)


def places(shape, by):
    return np.indices(shape).reshape(len(shape), -1).T[by.numpy()]


@given(st.data(), shapes())
def test_every_order_holds_each_token_once(data, shape):
    by = data.draw(orders(shape))
    if by is not None:
        assert by.dtype == torch.int64 and sorted(by.tolist()) == list(range(math.prod(shape)))


@pytest.mark.parametrize("shape", GRIDS, ids=str)
def test_row_major_is_the_order_of_the_patterns(shape):
    assert torch.equal(order.row_major(shape), torch.arange(math.prod(shape)))
    assert masks.swin(shape, window=2, order=order.row_major(shape), block=16) == masks.swin(shape, window=2, block=16)


@given(st.data(), shapes())
def test_tiles_come_one_after_another_each_in_row_major_order(data, shape):
    tile = tuple(data.draw(st.integers(1, side + 1)) for side in shape)
    corners = itertools.product(*(range(0, side, size) for side, size in zip(shape, tile)))
    token = np.arange(math.prod(shape)).reshape(shape)
    expected = [token[tuple(slice(c, c + t) for c, t in zip(corner, tile))].reshape(-1) for corner in corners]
    assert order.tiles(shape, tile).tolist() == np.concatenate(expected).tolist()


@given(st.data(), shapes())
def test_residues_take_one_sparse_grid_after_another(data, shape):
    step = tuple(data.draw(st.integers(1, side)) for side in shape)
    starts = itertools.product(*map(range, step))
    token = np.arange(math.prod(shape)).reshape(shape)
    expected = [token[tuple(slice(s, None, d) for s, d in zip(start, step))].reshape(-1) for start in starts]
    assert order.residues(shape, step).tolist() == np.concatenate(expected).tolist()


def interleaved(place, bits):
    return "".join(str(x >> bit & 1) for bit in reversed(range(bits)) for x in place)


@given(shapes())
def test_morton_sorts_by_interleaved_bits(shape):
    bits = max(shape).bit_length()
    everywhere = list(itertools.product(*map(range, shape)))
    expected = sorted(range(len(everywhere)), key=lambda t: interleaved(everywhere[t], bits))
    assert order.morton(shape).tolist() == expected


@pytest.mark.parametrize("shape", [(2,), (2, 2), (4, 4), (32, 32), (2, 2, 2), (8, 8, 8), (4, 4, 4, 4)], ids=str)
def test_hilbert_goes_from_neighbour_to_neighbour(shape):
    steps = np.abs(np.diff(places(shape, order.hilbert(shape)), axis=0)).sum(1)
    assert (steps == 1).all()


@pytest.mark.parametrize("side", [2, 4, 8, 16])
def test_hilbert_fills_one_quarter_after_another(side):
    where = places((32, 32), order.hilbert((32, 32))) // side
    assert (where.reshape(-1, side**2, 2) == where.reshape(-1, side**2, 2)[:, :1]).all()


@given(shapes(60))
def test_hilbert_of_any_sides_is_the_curve_of_the_enclosing_cube(shape):
    cube = (1 << (max(shape) - 1).bit_length(),) * len(shape)
    assume(math.prod(cube) <= 2**15)
    curve = places(cube, order.hilbert(cube))
    inside = curve[(curve < np.array(shape)).all(1)]
    assert np.array_equal(places(shape, order.hilbert(shape)), inside)


@CURVES
def test_long_thin_grids_cost_no_more_than_their_tokens(curve):
    assert sorted(curve((3, 2**16)).tolist()) == list(range(3 * 2**16))


@given(st.integers(1, 50), SEEDS)
def test_the_inverse_puts_every_token_back(count, seed):
    by = torch.from_numpy(np.random.default_rng(seed).permutation(count))
    x = torch.arange(count)
    assert torch.equal(x[by][order.inverse(by)], x)
    assert torch.equal(x[order.inverse(by)][by], x)


@given(st.data(), SEEDS, st.sampled_from(["blockwise", "reference"]))
def test_attention_of_permuted_tokens_is_permuted_attention(data, seed, backend):
    shape = data.draw(st.sampled_from([(8, 9), (5, 13), (4, 4, 5)]))
    by = data.draw(orders(shape))
    by = order.row_major(shape) if by is None else by
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = torch.randn(4, 2, 2, math.prod(shape), 16, dtype=torch.float64, generator=generator)
    results = []
    for build, chosen in ((masks.axial, None), (masks.axial, by)):
        order_of = slice(None) if chosen is None else chosen
        x = [t[:, :, order_of].clone().requires_grad_() for t in (q, k, v)]
        out = attention(*x, build(shape, order=chosen, block=16), backend=backend)
        out.backward(dout[:, :, order_of])
        results.append([out.detach(), *(t.grad for t in x)])
    for plain, permuted in zip(*results):
        torch.testing.assert_close(permuted, plain[:, :, by])
        torch.testing.assert_close(permuted[:, :, order.inverse(by)], plain)


# ---------------------------------------------------------------------- errors


@CURVES
@pytest.mark.parametrize("shape", [16, "4x4", ()], ids=str)
def test_orders_refuse_what_is_no_shape(curve, shape):
    with pytest.raises(TypeError, match="shape must be a tuple of side lengths"):
        curve(shape)


def test_orders_refuse_tiles_and_steps_that_are_none():
    with pytest.raises(ValueError, match="tile must be at least 1 on every axis; got 0"):
        order.tiles((4, 4), 0)
    with pytest.raises(ValueError, match=r"step must be an integer, or one for each of the 2 axes; got \(2,\)"):
        order.residues((4, 4), (2,))


def test_hilbert_refuses_a_cube_that_it_cannot_number():
    with pytest.raises(ValueError, match=r"shape must lie in a cube of at most 2\^62 tokens for a Hilbert curve; got"):
        order.hilbert((1, 1, 1, 2**16 + 1))


def test_the_inverse_refuses_what_is_no_order():
    with pytest.raises(TypeError, match=r"order must be a list of integers; got torch\.float32"):
        order.inverse([0.0, 1.0])
    with pytest.raises(TypeError, match=r"order must be an integer tensor; got torch\.bool"):
        order.inverse(torch.tensor([True, False]))
    with pytest.raises(ValueError, match=r"order must have shape \[N\]; got \[2, 2\]"):
        order.inverse(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"order must hold each of 0\.\.1 once"):
        order.inverse(torch.tensor([1, 1]))

from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.analysis import bitrows, composition, diameter, layers_to_full_reach, reach, relation
from tests.drawn.counts import examples_times
from tests.drawn.masks import blocks, dense_masks, lengths

MODULE = import_module("sparseflash.analysis.reach")
MOST = 100
HALF = examples_times(1 / 2)


@st.composite
def layers_of_masks(draw, most_layers=3):
    """`(masks, dense)`: one mask a layer over the same tokens, and for each what it keeps, `[B or 1, H or 1, N, N]`."""
    length, batch = draw(lengths(MOST)), draw(st.integers(1, 2))
    given = draw(st.none() | st.lists(st.integers(0, length + 5), min_size=batch, max_size=batch))
    found = []
    for _ in range(draw(st.integers(1, most_layers))):
        block, heads = draw(blocks()), draw(st.integers(1, 2))
        mask = BlockMask.from_dense(draw(dense_masks(length, length, batch, heads, block)), block=block)
        if given is not None:
            mask = mask.with_lengths(torch.tensor(given))
        found.append(mask)
    return found


def one_step(mask):
    """The pairs of tokens that a layer connects, heads united, with the residual connection; and the
    existing tokens.
    """
    seen = mask.to_dense().any(1)
    exists = torch.ones(len(seen), mask.q_len, dtype=torch.bool)
    if mask.lengths is not None:
        exists = torch.arange(mask.q_len) < mask.q_lengths[:, None]
    return seen | torch.diag_embed(exists), exists


def dense_reach(every, layers):
    """`R = (M_L or I) ... (M_1 or I)` on dense matrices, for a list that is repeated."""
    steps = [one_step(mask) for mask in every]
    batch = max(len(step) for step, _ in steps)
    result = torch.diag_embed(steps[0][1]).float().expand(batch, -1, -1)
    for layer in range(layers):
        result = (steps[layer % len(steps)][0].float() @ result).clamp(max=1)
    return result.bool()


def dense_layers(every, wanted=None):
    steps = [one_step(mask)[0].float() for mask in every]
    exists = one_step(every[0])[1]
    reached = [dense_reach(every, 0)]
    while len(reached) <= len(steps) or not torch.equal(reached[-1], reached[-1 - len(steps)]):
        reached.append((steps[(len(reached) - 1) % len(steps)] @ reached[-1].float()) > 0)
    wanted = reached[-1] if wanted is None else wanted & exists[:, :, None] & exists[:, None, :]
    enough = [not (wanted & ~now).any() for now in reached]
    return enough.index(True) if any(enough) else None


def smallest_block(every):
    return min(min(mask.block_q, mask.block_k) for mask in every)


# ---------------------------------------------------------------------- reach


@given(layers_of_masks(), st.integers(0, 5))
def test_reach_is_the_boolean_power_of_the_dense_matrices(every, layers):
    found = reach(every, layers)
    expected = dense_reach(every, layers)
    found.validate()
    assert torch.equal(found.to_dense()[:, 0], expected)
    assert found == BlockMask.from_dense(expected[:, None], block=smallest_block(every))


@given(layers_of_masks(most_layers=1), st.integers(1, 9))
def test_a_mask_is_a_list_of_one(every, layers):
    assert reach(every[0], layers) == reach(every, layers)
    assert reach(every[0], layers) == reach(every * 2, layers)


def test_without_a_number_of_layers_each_mask_is_one_layer():
    window, butterfly = masks.local(300, window=3, block=32), masks.butterfly(300, block=32)
    assert reach(window) == reach(window, 1)
    assert reach([window, butterfly]) == reach([window, butterfly], 2)


# ---------------------------------------------------------------------- layers to full reach


@HALF
@given(layers_of_masks(), st.booleans())
def test_layers_are_counted_as_by_dense_matrices(every, causal):
    length = every[0].q_len
    wanted = torch.ones(1, length, length, dtype=torch.bool)
    assert layers_to_full_reach(every, causal=causal) == dense_layers(every, wanted.tril() if causal else wanted)


@HALF
@given(layers_of_masks())
def test_diameter_is_where_reach_stops_growing(every):
    assert diameter(every) == dense_layers(every)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 17, 32, 33, 39, 64, 100, 127])
def test_a_butterfly_reaches_everything_in_log2_layers(count):
    most = (count - 1).bit_length()
    mask = masks.butterfly(count * 16 - 3, block=16)
    found = layers_to_full_reach(mask)
    assert found == diameter(mask) <= max(most, 1)
    if count & (count - 1) == 0:
        assert found == max(most, 1)  # one block still needs a layer to see itself whole
    assert layers_to_full_reach(masks.butterfly(count * 16 - 3, block=16, causal=True), causal=True) <= max(most, 1)


@pytest.mark.parametrize(("length", "window"), [(2000, 33), (2000, 201), (4096, 257)])
def test_a_window_needs_as_many_layers_as_it_fits(length, window):
    mask = masks.local(length, window=window, block=128)
    assert layers_to_full_reach(mask) == -(-(length - 1) // (window // 2))


def test_a_long_butterfly_takes_seconds():
    assert layers_to_full_reach(masks.butterfly(262_144)) == 11


@pytest.mark.parametrize("count", [1, 3])
def test_nothing_is_composed_with_the_identity(monkeypatch, count):
    seen = []

    def compose(a, b):
        seen.extend([a, b])
        return composition.compose(a, b)

    monkeypatch.setattr(MODULE, "compose", compose)
    every = [masks.local(300, window=window, block=32) for window in (33, 9, 3)[:count]]
    assert layers_to_full_reach(every) == dense_layers(every)
    identity = relation.of_walks([], 32, 300)
    assert seen and identity not in seen


def test_a_result_that_is_too_large_says_so(monkeypatch):
    monkeypatch.setattr(MODULE, "MOST_TILES", 20)
    mask = masks.butterfly(128, block=16)
    assert len(reach(mask, 0).indices) == 8
    with pytest.raises(ValueError, match=r"at most 20 tiles; got 32 tiles of 16 x 16.*larger blocks"):
        reach(mask, 1)
    assert layers_to_full_reach(mask) == 3


def test_too_many_blocks_are_refused(monkeypatch):
    monkeypatch.setattr("sparseflash.analysis.layers.MOST_BLOCKS", 4)
    reach(masks.local(64, window=3, block=16), 1)
    for function in (reach, layers_to_full_reach, diameter):
        with pytest.raises(ValueError, match="at most 4 block rows; got 5 of 16 tokens"):
            function(masks.local(65, window=3, block=16))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], TypeError, r"masks must be a BlockMask or a sequence of one or more; got \[\]"),
        (["x"], TypeError, "masks must be a BlockMask or a sequence"),
        (BlockMask.dense(16, 32), ValueError, "as many queries as keys.*got 16 x 32"),
        ([BlockMask.dense(16), BlockMask.dense(32)], ValueError, "one length; got 16 and 32 tokens"),
        (BlockMask.dense(16).with_lengths(torch.zeros(0, dtype=torch.int32)), ValueError, "at least one batch element"),
        (
            [BlockMask.dense(16).with_lengths(torch.full((n,), 16)) for n in (2, 3)],
            ValueError,
            "one batch size, or 1; got 2 and 3",
        ),
        (
            [BlockMask.dense(16).with_lengths(torch.tensor([n])) for n in (4, 5)],
            ValueError,
            "must have the same lengths, or none",
        ),
    ],
)
def test_masks_that_are_no_layers_of_one_model_are_refused(given, error, message):
    for function in (lambda given: reach(given, 1), layers_to_full_reach, diameter):
        with pytest.raises(error, match=message):
            function(given)


def test_layers_must_be_a_count():
    with pytest.raises(ValueError, match="layers must not be negative; got -1"):
        reach(BlockMask.dense(16), -1)
    with pytest.raises(TypeError, match=r"layers must be an integer number of layers; got 1\.5"):
        reach(BlockMask.dense(16), 1.5)


# ---------------------------------------------------------------------- bit matrices


@given(st.integers(1, 150), st.integers(1, 150), st.integers(1, 150), st.floats(0, 1), st.integers(0, 2**31 - 1))
@example(64, 128, 64, 0.5, 0)
@example(150, 150, 150, 1.0, 0)
def test_bit_matrices_are_boolean_matrices(rows, inner, cols, share, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.random((rows, inner)) < share, rng.random((inner, cols)) < share
    bits_a, bits_b = bitrows.pack(a), bitrows.pack(b)
    assert (bitrows.unpack(bits_a, inner) == a).all()
    assert (bitrows.unpack(bitrows.product(bits_a, bits_b), cols) == ((a.astype(int) @ b.astype(int)) > 0)).all()
    assert (bitrows.transpose(bits_a, inner) == bitrows.pack(a.T)).all()
    assert bitrows.count(bits_a, inner) == a.sum()
    assert [x.tolist() for x in bitrows.pairs(bits_a, inner)] == [x.tolist() for x in a.nonzero()]
    i, j = rng.integers(0, rows, 20), rng.integers(0, cols, 20)
    assert (bitrows.meet(bits_a, bitrows.pack(b.T), i, j) == (a[i] & b.T[j]).any(1)).all()
    order = rng.permutation(int(a.sum()))
    assert (bitrows.of_pairs(*(x[order] for x in a.nonzero()), rows, inner) == bits_a).all()
    assert (bitrows.unpack(bitrows.below(rows), rows) == np.tri(rows, k=-1, dtype=bool)).all()


def test_large_bit_matrices_are_unpacked_in_strips(monkeypatch):
    monkeypatch.setattr(bitrows, "_AT_ONCE", 1000)
    a = np.random.default_rng(0).random((200, 130)) < 0.3
    bits = bitrows.pack(a)
    assert (bitrows.transpose(bits, 130) == bitrows.pack(a.T)).all()
    assert bitrows.count(bits, 130) == a.sum()
    assert [x.tolist() for x in bitrows.pairs(bits, 130)] == [x.tolist() for x in a.nonzero()]


@pytest.mark.parametrize("words", [8, 1 << 17])
@pytest.mark.parametrize("share", [0.002, 0.02, 0.3])
def test_products_of_long_runs_in_strips(monkeypatch, words, share):
    monkeypatch.setattr(bitrows, "_WORDS_AT_ONCE", words)
    rng, (i, j) = np.random.default_rng(0), np.indices((700, 700))
    window, some = abs(i - j) <= 150, rng.random((700, 700)) < share
    for a, b in ((window, window), (window | some, some), (some, window | some), (i >= j, some)):
        expected = (a.astype(np.float32) @ b.astype(np.float32)) > 0
        assert (bitrows.product(bitrows.pack(a), bitrows.pack(b)) == bitrows.pack(expected)).all()

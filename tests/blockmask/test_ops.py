import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from sparseflash import BlockMask, masks
from sparseflash.blockmask import bitmask
from sparseflash.blockmask.ops import boolean
from tests.compared.algebra import assert_is, peak_of
from tests.drawn.counts import examples_times
from tests.drawn.dynamic_masks import made_dynamic
from tests.drawn.masks import SEEDS, block_masks, blocks, dense_masks, lengths
from tests.watched.largest_tensor import LargestTensor

MOST = 130
BINARY = {
    "and": (operator.and_, operator.and_),
    "or": (operator.or_, operator.or_),
    "xor": (operator.xor, operator.xor),
    "minus": (operator.sub, lambda a, b: a & ~b),
}
EACH = pytest.mark.parametrize("name", BINARY)
OF_FLEXATTENTION = create_block_mask(lambda b, h, q, k: k <= q, 1, 1, 64, 64, device="cpu")


@st.composite
def mask_groups(draw, count, most=MOST):
    q_len = draw(lengths(most))
    k_len = draw(st.just(q_len) | lengths(most))
    batch, heads = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
    stops = st.lists(st.integers(0, max(q_len, k_len)), min_size=batch, max_size=batch)
    shared = draw(stops)
    group = []
    for _ in range(count):
        block = draw(blocks())
        mask = BlockMask.from_dense(draw(dense_masks(q_len, k_len, batch, heads, block)), block=block)
        given_lengths = draw(st.sampled_from([None, "shared", "own"]))
        if given_lengths is not None and mask.shape[0] in (1, batch):
            mask = mask.with_lengths(torch.tensor(shared if given_lengths == "shared" else draw(stops)))
        group.append(mask)
    return group


# ---------------------------------------------------------------------- against dense matrices


@EACH
@given(pair=mask_groups(2))
def test_an_operator_does_to_masks_what_it_does_to_dense_matrices(name, pair):
    of_masks, of_dense = BINARY[name]
    a, b = pair
    dense_a, dense_b = a.to_dense(), b.to_dense()
    result = of_masks(a, b)
    assert_is(result, of_dense(dense_a, dense_b))
    assert (result.block_q, result.block_k) == (min(a.block_q, b.block_q), min(a.block_k, b.block_k))
    assert torch.equal(a.to_dense(), dense_a) and torch.equal(b.to_dense(), dense_b)


@given(block_masks(MOST, batch=2, heads=3))
def test_complement_is_live_where_the_mask_is_dead(mask):
    dense = mask.to_dense()
    assert_is(~mask, ~dense)
    assert torch.equal(mask.to_dense(), dense)
    assert ~~mask == mask.bake_lengths()


@examples_times(1 / 3)
@given(mask_groups(3))
def test_the_laws_of_boolean_algebra(group):
    a, b, c = group
    plain = [BlockMask.bake_lengths(mask) for mask in group]
    x, y, z = plain
    assert ~(x & y) == ~x | ~y
    assert ~(x | y) == ~x & ~y
    assert x ^ y == (x | y) - (x & y)
    assert x - y == x & ~y
    assert x & (y | z) == (x & y) | (x & z)
    assert x | y == y | x and x & y == y & x and x ^ y == y ^ x
    assert (x ^ y) ^ y == (x | y).reblock(((x ^ y).block_q, (x ^ y).block_k)) - (y - x)
    assert ((a | b) - (a & b)).bake_lengths() == (a ^ b).bake_lengths() == x ^ y
    assert ((a - b) - c).bake_lengths() == (a - (b | c)).bake_lengths()


@given(block_masks(MOST, batch=2, heads=3))
def test_a_mask_with_itself_and_with_nothing(mask):
    nothing = BlockMask.from_dense(torch.zeros(mask.q_len, mask.k_len, dtype=torch.bool), block=16)
    nothing = nothing.reblock((mask.block_q, mask.block_k))
    everything = BlockMask.dense(mask.q_len, mask.k_len, block=(mask.block_q, mask.block_k))
    assert mask & mask == mask
    assert mask | mask == mask
    assert not (mask ^ mask).to_dense().any() and len((mask - mask).indices) == 0
    assert mask & everything == mask
    assert mask - nothing == mask
    assert (mask | nothing).bake_lengths() == mask.bake_lengths()
    assert mask ^ everything == ~mask


def test_heads_that_become_equal_are_stored_once():
    per_head = masks.per_head([masks.causal(200, block=32), masks.local(200, window=9, causal=True, block=32)])
    assert (per_head & masks.local(200, window=9, causal=True, block=32)).pattern.tolist() == [[0, 0]]
    assert (per_head - masks.causal(200, block=32)).pattern.tolist() == [[0, 0]]


def test_patterns_broadcast_over_heads_and_batch():
    heads = masks.per_head([masks.causal(100, block=16), masks.local(100, window=5, block=16)])
    batch = masks.per_batch([masks.local(100, window=n, block=32) for n in (3, 7, 3)])
    both = heads & batch
    assert both.pattern.tolist() == [[0, 1], [2, 3], [0, 1]]
    assert_is(both, heads.to_dense() & batch.to_dense())


def test_every_tile_may_be_a_chunk_of_its_own(monkeypatch):
    a, b = masks.local(300, window=70, block=32), masks.butterfly(300, block=16, causal=True)
    padded = a.with_lengths(torch.tensor([3, 130, 300]))
    expected = [a & b, a | b, a ^ b, a - b, ~a, padded.bake_lengths()]
    monkeypatch.setattr(bitmask, "WORDS_AT_ONCE", 1)
    assert [a & b, a | b, a ^ b, a - b, ~a, padded.bake_lengths()] == expected


# ---------------------------------------------------------------------- padding


@given(block_masks(MOST, batch=3, heads=2))
def test_baked_lengths_leave_the_same_scores(mask):
    baked = mask.bake_lengths()
    assert baked.lengths is None
    assert_is(baked, mask.to_dense())
    assert mask.lengths is not None or baked is mask


@given(st.lists(st.integers(0, 300), min_size=2, max_size=2), st.lists(st.integers(0, 300), min_size=2, max_size=2))
def test_the_smaller_length_holds_in_an_intersection(first, second):
    window, past = masks.local(300, window=40, block=32), masks.causal(300, block=32)
    one, other = torch.tensor(first), torch.tensor(second)
    expected = (window & past).with_lengths(torch.minimum(one, other))
    assert window.with_lengths(one) & past.with_lengths(other) == expected
    assert window.with_lengths(one) & past == (window & past).with_lengths(one)
    assert past & window.with_lengths(one) == (window & past).with_lengths(one)


@pytest.mark.parametrize("name", ["or", "xor", "minus"])
def test_equal_lengths_stay_lengths(name):
    of_masks, of_dense = BINARY[name]
    stops = torch.tensor([17, 300, 64])
    window, past = masks.local(300, window=40, block=32), masks.causal(300, block=32)
    expected = of_masks(window, past).with_lengths(stops)
    assert of_masks(window.with_lengths(stops), past.with_lengths(stops.clone())) == expected
    other = past.with_lengths(torch.tensor([16, 300, 64]))
    padded = window.with_lengths(stops)
    assert_is(of_masks(padded, other), of_dense(padded.to_dense(), other.to_dense()))


def test_a_difference_keeps_the_lengths_of_the_left_and_honours_those_of_the_right():
    stops, longer, shorter = torch.tensor([17, 100]), torch.tensor([17, 120]), torch.tensor([16, 120])
    a, b = masks.causal(300, block=32), masks.local(300, window=40, block=32)
    assert a.with_lengths(stops) - b == (a - b).with_lengths(stops)
    assert a.with_lengths(stops) - b.with_lengths(longer) == (a - b).with_lengths(stops)
    for left in (a, a.with_lengths(stops)):
        result = left - b.with_lengths(shorter)
        assert (result.lengths is None) == (left.lengths is None)
        assert_is(result, left.to_dense() & ~b.with_lengths(shorter).to_dense())


@EACH
def test_one_length_serves_a_batch(name):
    of_masks, of_dense = BINARY[name]
    batch = masks.per_batch([masks.local(100, window=n, block=32) for n in (3, 7)])
    one, other = (masks.causal(100, block=32).with_lengths(torch.tensor([stop])) for stop in (50, 40))
    padded = batch.with_lengths(torch.tensor([60, 60]))
    for a, b in ((one, batch), (batch, one), (one, padded), (padded, one), (one, other)):
        assert_is(of_masks(a, b), of_dense(a.to_dense(), b.to_dense()))


def test_lengths_of_no_sequence_cannot_be_baked():
    with pytest.raises(ValueError, match="lengths must have at least one sequence to be written into the tiles; got"):
        masks.causal(64, block=16).with_lengths(torch.zeros(0, dtype=torch.int64)).bake_lengths()


# ---------------------------------------------------------------------- what does not fit


@EACH
@pytest.mark.parametrize(
    "other",
    [3, None, torch.ones(64, 64, dtype=torch.bool), lambda q, k: k <= q, OF_FLEXATTENTION],
    ids=["number", "None", "tensor", "rule", "FlexAttention's"],
)
def test_what_is_no_mask_is_refused_with_how_to_make_one(name, other):
    with pytest.raises(TypeError, match=r"mask must be a sparseflash BlockMask; got .* \(BlockMask\.from_dense takes"):
        BINARY[name][0](masks.causal(64, block=16), other)


@EACH
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: masks.causal(64, 65, block=16), "same q_len and k_len to be combined; got 64 x 64 and 64 x 65"),
        (lambda: masks.causal(63, 64, block=16), "same q_len and k_len to be combined; got 64 x 64 and 63 x 64"),
        (
            lambda: masks.per_head([masks.causal(64, block=16)] * 3),
            r"must have the same batch size and number of heads, or 1, to be combined; got 1 x 2 and 1 x 3 \(batch x h",
        ),
        (lambda: masks.causal(64, block=16).to("meta"), "must be on one device to be combined; got cpu and meta"),
    ],
    ids=["k_len", "q_len", "heads", "device"],
)  # fmt: skip
def test_masks_that_do_not_fit_together_are_refused(name, other, message):
    with pytest.raises(ValueError, match=message):
        BINARY[name][0](masks.per_head([masks.causal(64, block=16)] * 2), other())


@EACH
def test_batch_sizes_that_differ_are_refused_where_lengths_give_them(name):
    two, three = (masks.causal(64, block=16).with_lengths(torch.full((n,), 9)) for n in (2, 3))
    with pytest.raises(ValueError, match=r"or 1, to be combined; got 2 x 1 and 3 x 1 \(batch x heads\)"):
        BINARY[name][0](two, three)


# ---------------------------------------------------------------------- stacking


@given(mask_groups(3))
def test_per_head_puts_heads_side_by_side(group):
    batch = max(mask.shape[0] for mask in group)
    expected = torch.cat([mask.to_dense().expand(batch, -1, -1, -1) for mask in group], dim=1)
    result = masks.per_head(group)
    assert_is(result, expected)
    assert (result.block_q, result.block_k) == (min(m.block_q for m in group), min(m.block_k for m in group))


@given(mask_groups(3))
def test_per_batch_puts_sequences_side_by_side(group):
    heads = max(mask.shape[1] for mask in group)
    expected = torch.cat([mask.to_dense().expand(-1, heads, -1, -1) for mask in group], dim=0)
    result = masks.per_batch(group)
    assert_is(result, expected)
    assert (result.lengths is None) == all(mask.lengths is None for mask in group)


def test_one_mask_stacked_is_that_mask():
    mask = masks.local(100, window=7, block=16)
    assert masks.per_head([mask]) == mask == masks.per_batch([mask])
    padded = mask.with_lengths(torch.tensor([30, 100]))
    assert masks.per_head([padded]) == padded
    assert torch.equal(masks.per_batch([padded]).to_dense(), padded.to_dense())
    assert masks.per_head((mask, mask)).pattern.tolist() == [[0, 0]]


def test_stacked_heads_keep_lengths_that_are_equal_only():
    window, past = masks.local(100, window=7, block=16), masks.causal(100, block=16)
    stops = torch.tensor([30, 100])
    assert masks.per_head([window, past]).with_lengths(stops) == masks.per_head(
        [window.with_lengths(stops), past.with_lengths(stops.clone())]
    )
    assert masks.per_head([window.with_lengths(stops), past]).lengths is None


@pytest.mark.parametrize("stack", [masks.per_head, masks.per_batch])
@pytest.mark.parametrize(
    ("given_masks", "error", "message"),
    [
        (lambda: [], ValueError, "masks must hold at least one mask; got none"),
        (lambda: masks.causal(64, block=16), TypeError, "masks must be a list of BlockMasks; got a single one"),
        (lambda: [masks.causal(64, block=16), 3], TypeError, "masks must hold BlockMasks; got int"),
        (
            lambda: [masks.causal(64, block=16), masks.causal(65, block=16)],
            ValueError,
            r"stacked; got 64 x 64 and 65 x 65\. Sequences of different lengths are padded \(mask\.with_lengths\)",
        ),
        (
            lambda: [masks.causal(64, block=16), masks.causal(64, block=16).to("meta")],
            ValueError,
            "masks must be on one device to be stacked; got cpu and meta",
        ),
    ],
)
def test_masks_that_cannot_be_stacked_are_refused(stack, given_masks, error, message):
    with pytest.raises(error, match=message):
        stack(given_masks())


def test_heads_of_different_batches_are_refused():
    one = masks.causal(64, block=16)
    two, three = masks.per_batch([one] * 2), masks.per_batch([one] * 3)
    with pytest.raises(ValueError, match="masks must have the same batch size, or 1, to be stacked; got 2, 1, 3"):
        masks.per_head([two, one, three])
    with pytest.raises(ValueError, match="masks must have the same number of heads, or 1, to be stacked; got 2, 3"):
        masks.per_batch([masks.per_head([one] * 2), masks.per_head([one] * 3)])


# ---------------------------------------------------------------------- cost


def test_bits_are_combined_once_a_distinct_pair_of_tiles(monkeypatch):
    counts = []
    in_chunks = boolean.in_chunks
    monkeypatch.setattr(
        boolean, "in_chunks", lambda f, recipes, n: counts.append(len(recipes)) or in_chunks(f, recipes, n)
    )
    for tokens in (2**14, 2**17):
        masks.local(tokens, window=1000) | masks.butterfly(tokens, causal=True)
    assert counts[0] == counts[1] < 16


def test_an_intersection_makes_nothing_of_the_size_of_the_longer_mask():
    past, diagonal = masks.causal(131_072), masks.local(131_072, window=1)
    for a, b in ((past, diagonal), (diagonal, past)):
        with LargestTensor(a, b) as largest:
            result = a & b
        assert result == diagonal
        assert largest.nbytes < past.indices.nbytes / 20
    with LargestTensor(past, diagonal) as largest:
        assert (diagonal - past).density == 0
    assert largest.nbytes < past.indices.nbytes / 20


@pytest.mark.parametrize("name", BINARY)
def test_a_million_tokens_are_combined_in_seconds(name):
    tokens = 1_048_576
    window, butterfly = masks.local(tokens, window=1024), masks.butterfly(tokens)
    result, seconds, megabytes = peak_of(lambda: BINARY[name][0](window, butterfly))
    assert seconds < 5 and megabytes < 100
    assert result.nbytes < 4e6
    of = {"and": lambda a, b, both: both, "or": lambda a, b, both: a + b - both}
    of |= {"xor": lambda a, b, both: a + b - 2 * both, "minus": lambda a, b, both: a - both}
    scores = [round(mask.density * tokens * tokens) for mask in (result, window, butterfly, window & butterfly)]
    assert scores[0] == of[name](*scores[1:])


# ---------------------------------------------------------------------- dynamic masks


@given(mask_groups(2), SEEDS)
def test_dynamic_masks_combine_as_their_canonical_form(group, seed):
    (a, b), (dynamic_a, dynamic_b) = group, [made_dynamic(mask, seed) for mask in group]
    for exact, _ in BINARY.values():
        assert exact(dynamic_a, dynamic_b) == exact(a, b)
    assert ~dynamic_a == ~a
    for change in (
        lambda m: m.reblock(32),
        lambda m: m.crop(q=(0, 1)),
        lambda m: m.permute(q=torch.arange(m.q_len).flip(0)),
        lambda m: m.transpose(),
        lambda m: m.bake_lengths(),
        lambda m: masks.per_batch([m, m]),
    ):
        assert change(dynamic_a) == change(a)

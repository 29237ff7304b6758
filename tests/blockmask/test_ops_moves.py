import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, attention, masks
from sparseflash.blockmask import bitmask
from sparseflash.blockmask.arguments import BLOCKS
from sparseflash.blockmask.ops import crop as crop_module
from sparseflash.blockmask.ops import permute as permute_module
from tests.compared.algebra import assert_is, peak_of
from tests.drawn.counts import examples_times
from tests.drawn.masks import block_masks, blocks

MOST = 150
MANY = 1_048_576
any_mask = block_masks(MOST, BLOCKS, batch=2, heads=3)


def random_mask(q_len, k_len, block, seed=0):
    rng = np.random.default_rng(seed)
    return BlockMask.from_dense(rng.random((q_len, k_len)) < 0.3, block=block)


def several(tokens=300):
    return [
        masks.local(tokens, window=70, block=(16, 64)),
        masks.butterfly(tokens, block=32, causal=True),
        masks.per_head([masks.causal(tokens, block=64), masks.local(tokens, window=5, block=64)]),
        random_mask(tokens, tokens, (32, 16)),
    ]


@pytest.fixture
def one_tile_at_once(monkeypatch):
    monkeypatch.setattr(bitmask, "WORDS_AT_ONCE", 1)


def forbid(monkeypatch, module, name):
    def called(*arguments, **named):
        raise AssertionError(f"{name} was called")

    monkeypatch.setattr(module, name, called)


# ---------------------------------------------------------------------- reblock


@given(any_mask, blocks(BLOCKS))
def test_reblock_changes_the_tiles_and_no_score(mask, block):
    dense = mask.to_dense()
    result = mask.reblock(block)
    assert (result.block_q, result.block_k) == block
    assert_is(result, dense)
    assert (result.lengths is None) == (mask.lengths is None)
    assert result.reblock((mask.block_q, mask.block_k)) == mask
    assert torch.equal(mask.to_dense(), dense)


def test_reblock_takes_one_number_for_both_sides():
    mask = masks.local(300, window=20, block=64)
    assert mask.reblock(16) == mask.reblock((16, 16)) == masks.local(300, window=20, block=16)


def test_reblock_to_its_own_block_is_the_mask_itself():
    mask = masks.local(300, window=20, block=(64, 32))
    assert mask.reblock((64, 32)) is mask


def test_reblock_in_chunks(one_tile_at_once):
    for mask in several():
        for block in ((16, 16), (128, 128), (16, 256)):
            assert_is(mask.reblock(block), mask.to_dense())


@pytest.mark.parametrize("block", [0, 100, 512, (16,), (16, 24), None])
def test_reblock_refuses_what_is_no_block(block):
    with pytest.raises(ValueError, match="block must be one of 16, 32, 64, 128, 256, or a tuple of two of them; got"):
        masks.local(300, window=20).reblock(block)


# ---------------------------------------------------------------------- select


def chosen(count):
    several = st.lists(st.integers(0, count - 1), min_size=1, max_size=4)
    ends = st.tuples(st.integers(0, count - 1), st.integers(1, count)).filter(lambda pair: pair[0] < pair[1])
    return (
        st.integers(0, count - 1).map(lambda i: (i, [i]))
        | several.map(lambda some: (some, some))
        | several.map(lambda some: (torch.tensor(some), some))
        | several.map(lambda some: (np.array(some), some))
        | ends.map(lambda pair: (slice(*pair), list(range(*pair))))
    )


@given(any_mask, st.data())
def test_select_takes_batch_elements_and_heads_of_the_dense_matrix(mask, data):
    dense = mask.to_dense()
    batch, elements = data.draw(chosen(dense.shape[0]))
    heads, numbers = data.draw(chosen(dense.shape[1]))
    # A size of 1 is shared by all, and stays 1.
    elements, numbers = (x if size > 1 else [0] for x, size in zip((elements, numbers), dense.shape))
    result = mask.select(batch=batch, heads=heads)
    result.validate()
    assert torch.equal(result.to_dense().expand(len(elements), len(numbers), -1, -1), dense[elements][:, numbers])
    assert torch.equal(mask.to_dense(), dense)
    assert mask.select() == mask


def test_selected_heads_are_the_masks_that_were_put_together():
    parts = [masks.local(300, window=70, block=32), masks.causal(300, block=32), masks.butterfly(300, block=32)]
    mask = masks.per_head([parts[0], parts[0], parts[1], parts[2]])
    for number, part in zip(range(4), (parts[0], *parts)):
        assert mask.select(heads=number) == part
    assert masks.per_head([mask.select(heads=slice(0, 2)), mask.select(heads=slice(2, None))]) == mask
    assert mask.select(batch=[0, 0, 7]) == mask
    padded = parts[1].with_lengths([300, 4, 90])
    assert padded.select(batch=[2, 0]) == parts[1].with_lengths([90, 300])
    assert masks.per_batch(parts).with_lengths([300, 4, 90]).select(batch=2) == parts[2].with_lengths([90])


@pytest.mark.parametrize("heads", [-1, [5, -3], slice(5, 5), []])
def test_of_what_all_heads_share_something_must_be_chosen(heads):
    mask = masks.causal(64, block=16)
    assert mask.select(heads=slice(5, 7)) == mask.select(heads=[9, 3]) == mask
    with pytest.raises(ValueError, match=r"heads must (choose at least one|lie in 0)"):
        mask.select(heads=heads)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"heads": 2}, ValueError, r"heads must lie in 0\.\.1; got 2\.\.2"),
        ({"heads": [-1]}, ValueError, r"heads must lie in 0\.\.1; got -1"),
        ({"heads": []}, ValueError, "heads must choose at least one"),
        ({"heads": slice(2, 2)}, ValueError, "heads must choose at least one"),
        ({"heads": [[0]]}, TypeError, "heads must be a list of integers"),
        ({"heads": torch.tensor([[0]])}, ValueError, "heads must be a number, a slice or a list of numbers"),
        ({"heads": 0.5}, TypeError, "heads must be an integer"),
        ({"batch": "all"}, (TypeError, ValueError), "batch must"),
        ({"batch": torch.tensor([True])}, TypeError, "batch must be an integer tensor"),
    ],
    ids=str,
)
def test_select_refuses_what_is_no_choice(options, error, message):
    with pytest.raises(error, match=message):
        masks.per_head([masks.causal(64), masks.local(64, window=5)]).select(**options)


# ---------------------------------------------------------------------- crop


def ranges(length):
    edges = st.integers(0, length) | st.sampled_from([n for n in range(0, length + 1, 16)])
    return st.tuples(edges, edges).filter(lambda pair: pair[0] != pair[1]).map(lambda pair: tuple(sorted(pair)))


@given(any_mask, st.data())
def test_crop_is_a_slice_of_the_dense_matrix(mask, data):
    dense = mask.to_dense()
    q, k = data.draw(ranges(mask.q_len)), data.draw(ranges(mask.k_len))
    result = mask.crop(q=q, k=k)
    assert_is(result, dense[:, :, slice(*q), slice(*k)])
    assert (result.block_q, result.block_k) == (mask.block_q, mask.block_k)
    assert_is(mask.crop(q=q), dense[:, :, slice(*q)])
    assert_is(mask.crop(k=k), dense[..., slice(*k)])
    assert torch.equal(mask.to_dense(), dense)


def test_none_bounds_are_the_ends():
    mask = masks.local(300, window=50, block=32)
    assert mask.crop(q=(None, 100), k=(50, None)) == mask.crop(q=(0, 100), k=(50, 300))
    assert mask.crop() is mask
    assert mask.crop(q=(0, 300), k=(None, None)) is mask


@given(st.lists(st.integers(0, 200), min_size=2, max_size=2), ranges(200), ranges(200))
def test_crop_shifts_the_lengths(stops, q, k):
    mask = masks.causal(200, block=32).with_lengths(torch.tensor(stops))
    result = mask.crop(q=q, k=k)
    assert result.lengths.tolist() == [[min(max(n - a, 0), b - a) for n in stops] for a, b in (q, k)]
    assert_is(result, mask.to_dense()[:, :, slice(*q), slice(*k)])


def test_a_crop_between_blocks_moves_tiles_only(monkeypatch):
    forbid(monkeypatch, crop_module, "compose")
    mask = masks.local(300, window=50, block=(32, 64))
    assert_is(mask.crop(q=(96, 201), k=(64, 299)), mask.to_dense()[:, :, 96:201, 64:299])
    with pytest.raises(AssertionError, match="compose was called"):
        mask.crop(q=(97, 201))


def test_crop_in_chunks(one_tile_at_once):
    for mask in several():
        assert_is(mask.crop(q=(5, 290), k=(41, 300)), mask.to_dense()[:, :, 5:290, 41:300])


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("bounds", [(5, 5), (6, 5), (-1, 5), (0, 101), (100, None), (None, 0)])
def test_crop_refuses_what_is_no_range_of_the_tokens(side, bounds):
    message = rf"{side} must be \(start, stop\) with 0 <= start < stop <= 100; got \("
    with pytest.raises(ValueError, match=message):
        masks.causal(100, block=16).crop(**{side: bounds})


@pytest.mark.parametrize("bounds", [5, [1, 2, 3], (1, 2, 3), slice(0, 5), "05"])
def test_crop_refuses_what_is_no_pair(bounds):
    with pytest.raises(TypeError, match=r"q must be a pair of tokens \(start, stop\); got"):
        masks.causal(100, block=16).crop(q=bounds)


def test_crop_takes_lists_as_well():
    mask = masks.causal(100, block=16)
    assert mask.crop(q=[10, None], k=[0, np.int64(50)]) == mask.crop(q=(10, 100), k=(0, 50))


def test_crop_refuses_bounds_that_are_no_integers():
    with pytest.raises(TypeError, match=r"k's start must be an integer number of tokens; got 0\.5"):
        masks.causal(100, block=16).crop(k=(0.5, 5))
    with pytest.raises(TypeError, match="q's stop must be an integer number of tokens; got True"):
        masks.causal(100, block=16).crop(q=(0, True))


# ---------------------------------------------------------------------- permute


def random_order(length, seed):
    return torch.from_numpy(np.random.default_rng(seed).permutation(length))


@st.composite
def orders(draw, length):
    kind = draw(st.sampled_from(["random", "shift", "reverse", "stride", "blocks"]))
    tokens = torch.arange(length)
    if kind == "random":
        return random_order(length, draw(st.integers(0, 2**31)))
    if kind == "shift":
        return tokens.roll(draw(st.integers(0, length)))
    if kind == "reverse":
        return tokens.flip(0)
    size = draw(st.sampled_from([2, 3, 16, 32, 64]))
    if kind == "stride":
        return torch.cat([tokens[start::size] for start in range(size)])
    parts = list(tokens[: length // size * size].split(size)) if length >= size else []
    moved = [parts[i] for i in random_order(len(parts), draw(st.integers(0, 2**31)))] if parts else []
    return torch.cat([*moved, tokens[length // size * size :]])


@given(any_mask, st.data())
def test_permute_reorders_queries_and_keys(mask, data):
    dense = mask.to_dense()
    q, k = data.draw(orders(mask.q_len)), data.draw(orders(mask.k_len))
    assert_is(mask.permute(q=q, k=k), dense[:, :, q][..., k])
    assert_is(mask.permute(q=q), dense[:, :, q])
    assert_is(mask.permute(k=k), dense[..., k])
    assert torch.equal(mask.to_dense(), dense)


@given(block_masks(MOST, batch=2, heads=2).filter(lambda mask: mask.q_len == mask.k_len), st.data())
def test_one_order_serves_both_sides_and_its_inverse_undoes_it(mask, data):
    order = data.draw(orders(mask.q_len))
    result = mask.permute(order)
    assert_is(result, mask.to_dense()[:, :, order][..., order])
    assert result.permute(order.argsort()) == mask.bake_lengths()
    assert mask.permute(torch.arange(mask.q_len)) == mask.bake_lengths()


def test_attention_in_another_order_is_attention_reordered():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 100, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = masks.per_head([masks.causal(100, block=16), masks.local(100, window=9, block=16)])
    mask, order = mask.with_lengths(torch.tensor([70, 100])), random_order(100, 1)
    expected = attention(q, k, v, mask)[:, :, order]
    result = attention(q[:, :, order], k[:, :, order], v[:, :, order], mask.permute(order))
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [torch.Tensor.tolist, torch.Tensor.numpy, lambda order: order.to(torch.int16)])
def test_an_order_may_be_a_list_an_array_or_of_any_integer_type(make):
    mask, order = masks.causal(100, block=16), random_order(100, 2)
    assert mask.permute(make(order)) == mask.permute(order)


@pytest.mark.parametrize("tokens", [256, 270])
def test_an_order_of_whole_blocks_moves_tiles_only(tokens, monkeypatch):
    forbid(monkeypatch, permute_module, "_gather_queries")
    moved = torch.cat([torch.arange(256).view(8, 32)[random_order(8, 3)].flatten(), torch.arange(256, tokens)])
    for mask in (
        masks.local(tokens, window=50, block=32),
        random_mask(tokens, tokens, (32, 16)),
        masks.causal(tokens, block=16),
    ):
        assert_is(mask.permute(moved), mask.to_dense()[:, :, moved][..., moved])
        with pytest.raises(AssertionError, match="_gather_queries was called"):
            mask.permute(moved.roll(1))


def test_a_ragged_block_that_moves_away_from_the_end_is_no_move_of_tiles():
    order = torch.cat([torch.arange(256, 270), torch.arange(256)])
    mask = random_mask(270, 270, 32)
    assert_is(mask.permute(order), mask.to_dense()[:, :, order][..., order])


@pytest.mark.parametrize("limit", [1, 40, 1000])
@pytest.mark.parametrize("name", ["ENTRIES_AT_ONCE", "PARTS_AT_ONCE"])
def test_permute_in_chunks(name, limit, monkeypatch, one_tile_at_once):
    chunks, original = [], permute_module._row_chunks

    def counting(mask, sources):
        chunks.append(list(original(mask, sources)))
        assert torch.equal(torch.cat(chunks[-1]), torch.arange(len(mask.indptr) - 1))
        return iter(chunks[-1])

    monkeypatch.setattr(permute_module, name, limit)
    monkeypatch.setattr(permute_module, "_row_chunks", counting)
    for mask in several(150):
        order = random_order(150, 4)
        assert_is(mask.permute(order), mask.to_dense()[:, :, order][..., order])
    assert limit > 1 or all(len(made) > 1 for made in chunks)


def test_an_order_that_recurs_makes_bits_once(monkeypatch):
    # Every block of 64 tokens is made of the same four rows of pixels.
    counts, original = [], permute_module._words_of

    def counting(parts, sources, known):
        counts.append(len(parts))
        return original(parts, sources, known)

    monkeypatch.setattr(permute_module, "_words_of", counting)
    totals = []
    for rows in (128, 512):
        counts.clear()
        order = torch.arange(rows * 32).view(rows // 4, 4, 8, 4).transpose(1, 2).flatten()
        masks.local(rows * 32, window=65, block=64).permute(order)
        totals.append(sum(counts))
    assert totals[0] == totals[1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "permute must be given order, q or k; got none"),
        ({"order": [0, 1, 2], "q": [0, 1, 2]}, ValueError, "either one order for both sides or q and k; got both"),
        ({"order": [0, 1]}, ValueError, r"order must have shape \[3\], one old token for each new one; got \[2\]"),
        ({"q": [[0, 1, 2]]}, ValueError, r"q must have shape \[3\], one old token for each new one; got \[1, 3\]"),
        ({"k": [0, 1, 3]}, ValueError, r"k must hold tokens from 0 to 2; got 0\.\.3"),
        ({"k": [0, 1, -1]}, ValueError, r"k must hold tokens from 0 to 2; got -1\.\.1"),
        ({"order": [0, 2, 2]}, ValueError, "order must hold every token once; got token 2 2 times"),
        ({"order": [0.0, 1.0, 2.0]}, TypeError, r"order must hold integer token numbers; got torch\.float32"),
        ({"order": "abc"}, TypeError, "order must hold integer token numbers; got 'abc'"),
        ({"k": {0: 1}}, TypeError, "k must hold integer token numbers; got {0: 1}"),
        ({"q": [True, False, True]}, TypeError, r"q must hold integer token numbers; got torch\.bool"),
    ],
)
def test_permute_refuses_what_is_no_permutation_of_the_tokens(arguments, error, message):
    with pytest.raises(error, match=message):
        masks.causal(3, block=16).permute(**arguments)


def test_an_order_may_be_a_view_with_negative_strides():
    mask = masks.causal(100, block=16)
    assert mask.permute(np.arange(100)[::-1]) == mask.permute(list(range(99, -1, -1)))


def test_one_order_cannot_serve_sides_of_different_lengths():
    with pytest.raises(ValueError, match=r"must be given q or k if q_len and k_len differ, .* got 4 x 3"):
        masks.causal(4, 3, block=16).permute([0, 1, 2])


# ---------------------------------------------------------------------- transpose


@given(any_mask)
def test_transpose_exchanges_queries_and_keys(mask):
    dense = mask.to_dense()
    result = mask.transpose()
    assert (result.q_len, result.k_len, result.block_q, result.block_k) == (
        mask.k_len, mask.q_len, mask.block_k, mask.block_q,
    )  # fmt: skip
    assert_is(result, dense.transpose(-1, -2))
    assert (result.lengths is None) == (mask.lengths is None)
    assert result.transpose() == mask
    assert torch.equal(mask.to_dense(), dense)


def test_transpose_in_chunks(one_tile_at_once):
    for mask in several():
        assert_is(mask.transpose(), mask.to_dense().transpose(-1, -2))


# ---------------------------------------------------------------------- laws that join them


@examples_times(1 / 3)
@given(block_masks(100), st.data())
def test_operations_commute_with_the_boolean_ones(mask, data):
    other = random_mask(mask.q_len, mask.k_len, (32, 16))
    q, k = random_order(mask.q_len, 5), random_order(mask.k_len, 6)
    span = data.draw(ranges(mask.q_len))
    both = mask.bake_lengths() | other
    assert both.transpose() == mask.bake_lengths().transpose() | other.transpose()
    assert both.crop(q=span) == mask.bake_lengths().crop(q=span) | other.crop(q=span)
    assert both.permute(q=q, k=k) == mask.permute(q=q, k=k) | other.permute(q=q, k=k)
    assert (~both).crop(q=span) == ~both.crop(q=span)


# ---------------------------------------------------------------------- cost


@pytest.mark.parametrize(
    ("action", "megabytes"),
    [
        (lambda window: window.crop(q=(77, MANY - 5), k=(77, MANY - 5)), 100),
        (lambda window: window.crop(q=(77, 1000), k=(77, 1000)), 10),
        (lambda window: window.reblock(64), 150),
        (lambda window: window.reblock(256), 100),
        (lambda window: window.transpose(), 100),
        (lambda window: window.permute(torch.arange(MANY).view(-1, 128).flip(0).flatten()), 200),
    ],
    ids=["crop", "small crop", "finer", "coarser", "transpose", "blocks reversed"],
)
def test_a_million_tokens_are_moved_in_seconds(action, megabytes):
    window = masks.local(MANY, window=1024)
    result, seconds, peak = peak_of(lambda: action(window))
    assert seconds < 5 and peak < megabytes
    assert len(result.bits) <= 8


def test_a_million_tokens_keep_the_window_they_had():
    window = masks.local(MANY, window=1024)
    assert window.crop(q=(77, MANY - 51), k=(77, MANY - 51)) == masks.local(MANY - 128, window=1024)
    assert window.reblock(64) == masks.local(MANY, window=1024, block=64)
    assert window.transpose() == window
    assert window.permute(torch.arange(MANY).flip(0)) == window


def test_everything_is_made_on_the_device_of_the_mask():
    mask, other = masks.local(300, window=70, block=32), masks.butterfly(300, block=16, causal=True)
    padded, order = mask.with_lengths(torch.tensor([3, 130, 300])), random_order(300, 7)
    moved = torch.cat([torch.arange(256).view(8, 32).flip(0).flatten(), torch.arange(256, 300)])

    def results():
        yield from (mask & other, mask | other, mask ^ other, mask - other, ~mask, padded.bake_lengths())
        yield from (padded & other, padded | other, padded - other, padded.crop(q=(5, 300)), padded.crop(q=(0, 9)))
        yield from (mask.reblock(16), mask.reblock((16, 256)), mask.transpose(), mask.crop(q=(5, 299), k=(70, 201)))
        yield from (mask.permute(order), mask.permute(moved), other.permute(q=order), padded.permute(k=moved))
        yield from (masks.per_head([mask, other, padded]), masks.per_batch([mask, padded]))

    expected = list(results())
    with torch.device("meta"):
        assert list(results()) == expected

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import masks
from tests.drawn.masks import SEEDS, blocks, lengths
from tests.masks.mask_rules import BLOCKS, assert_keeps, grid
from tests.masks.sequence_sizes import MOST, assert_heads, sizes, square

# ---------------------------------------------------------------------- dense, causal, prefix


@given(lengths(MOST), lengths(MOST), blocks(BLOCKS))
def test_dense_keeps_every_score(q_len, k_len, block):
    assert_keeps(masks.dense(q_len, k_len, block=block), torch.ones(q_len, k_len, dtype=torch.bool))
    assert masks.dense(q_len, block=block) == masks.dense(q_len, q_len, block=block)


@given(lengths(MOST), lengths(MOST), st.integers(-2 * MOST, 2 * MOST), blocks(BLOCKS))
def test_causal_offset_is_the_position_of_the_first_query(q_len, k_len, offset, block):
    q, k = grid(q_len, k_len)
    assert_keeps(masks.causal(q_len, k_len, offset=offset, block=block), k <= q + offset)


def test_causal_refuses_an_offset_that_is_no_integer():
    with pytest.raises(TypeError, match=r"offset must be an integer number of tokens; got 0\.5"):
        masks.causal(4, offset=0.5)


@given(lengths(MOST), lengths(MOST), lengths(2 * MOST) | st.just(0), blocks(BLOCKS))
def test_prefix_is_seen_by_all_and_the_rest_causally(q_len, k_len, prefix, block):
    q, k = grid(q_len, k_len)
    mask = masks.prefix_lm(q_len, prefix=prefix, k_len=k_len, block=block)
    assert_keeps(mask, (k < prefix) | (k <= q + k_len - q_len))
    if prefix == 0:
        assert mask == masks.causal(q_len, k_len, block=block)
    if prefix >= k_len:
        assert mask == masks.dense(q_len, k_len, block=block)


# ---------------------------------------------------------------------- documents, chunks


@st.composite
def packed(draw):
    pairs = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=6))
    pairs.insert(draw(st.integers(0, len(pairs))), (draw(st.integers(1, 60)), draw(st.integers(1, 60))))
    return [q for q, _ in pairs], [k for _, k in pairs], draw(blocks(BLOCKS))


@given(packed(), st.booleans())
@example(([1] * 200, [1] * 200, (16, 32)), False)
def test_documents_see_themselves_only(drawn, causal):
    lengths_q, lengths_k, block = drawn
    live = torch.zeros(sum(lengths_q), sum(lengths_k), dtype=torch.bool)
    same = torch.zeros(sum(lengths_q), sum(lengths_q), dtype=torch.bool)
    at_q = at_k = 0
    for n_q, n_k in zip(lengths_q, lengths_k):
        live[at_q : at_q + n_q, at_k : at_k + n_k] = torch.ones(n_q, n_k).tril(n_k - n_q if causal else n_k) > 0
        same[at_q : at_q + n_q, at_q : at_q + n_q] = torch.ones(n_q, n_q).tril(0 if causal else n_q) > 0
        at_q, at_k = at_q + n_q, at_k + n_k
    assert_keeps(masks.documents(lengths_q, lengths_k, causal=causal, block=block), live)
    assert_keeps(masks.documents(torch.tensor(lengths_q), causal=causal, block=block), same)


def test_one_document_is_dense_or_causal():
    assert masks.documents([100], block=32) == masks.dense(100, block=32)
    assert (
        masks.documents(np.array([0, 100, 0]), [0, 70, 3], causal=True, block=32)
        .to_dense()[..., :70]
        .equal(masks.causal(100, 70, block=32).to_dense())
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([3, -1],), ValueError, "lengths must not be negative; got -1"),
        (([0, 0],), ValueError, r"lengths must have at least one token; got \[0, 0\]"),
        (([3, 4], [0, 0]), ValueError, r"k_lengths must have at least one token; got \[0, 0\]"),
        (([1.5],), TypeError, r"lengths must be a list of integers; got torch.float32 of shape \[1\]"),
        ((100,), TypeError, r"lengths must be a list of integers; got torch.int64 of shape \[\]"),
        (([True],), TypeError, "lengths must be a list of integers; got torch.bool"),
        ((["a"],), TypeError, r"lengths must be a list of integers; got \['a'\]"),
        (([3, 4], [3]), ValueError, "k_lengths must have one entry a document, 2 as lengths has; got 1"),
    ],
)
def test_documents_refuses_lengths_that_are_none(arguments, error, message):
    with pytest.raises(error, match=message):
        masks.documents(*arguments)


@given(sizes(), lengths(2 * MOST), st.booleans())
def test_chunks_see_themselves_only(size, chunk, causal):
    q_len, block = size
    q, k = square(q_len)
    live = q // chunk == k // chunk
    assert_keeps(masks.chunked(q_len, chunk=chunk, causal=causal, block=block), live & (k <= q) if causal else live)


# ---------------------------------------------------------------------- windows


@given(sizes(), st.integers(0, 2 * MOST), st.integers(0, 2 * MOST))
def test_asymmetric_window_reaches_left_and_right(size, left, right):
    q_len, block = size
    q, k = square(q_len)
    assert_keeps(masks.local(q_len, left=left, right=right, block=block), (q - left <= k) & (k <= q + right))


@given(sizes(), lengths(MOST), st.none() | st.integers(-MOST, MOST), st.integers(1, 40), st.integers(0, 20))
def test_windows_over_a_cache_of_keys(size, k_len, offset, window, sink):
    q_len, block = size
    q, k = grid(q_len, k_len)
    p = q + (k_len - q_len if offset is None else offset)
    given_lengths = {"k_len": k_len, "offset": offset, "block": block}
    causal = (p - window < k) & (k <= p)
    assert_keeps(masks.local(q_len, window=window, causal=True, **given_lengths), causal)
    assert_keeps(masks.local(q_len, window=window, **given_lengths), (p - k).abs() <= window // 2)
    assert_keeps(masks.local(q_len, left=window, right=sink, **given_lengths), (p - window <= k) & (k <= p + sink))
    assert_keeps(masks.streaming(q_len, window=window, sink=sink, **given_lengths), causal | ((k <= p) & (k < sink)))


@given(sizes(), lengths(2 * MOST), st.integers(1, 40), st.booleans())
@example((100, (16, 16)), 3, 2**40, False)
def test_dilated_window_counts_keys_that_lie_apart(size, window, dilation, causal):
    q_len, block = size
    q, k = square(q_len)
    apart = (q - k) % dilation == 0
    if causal:
        live = apart & (k <= q) & ((q - k) // dilation < window)
    else:
        live = apart & ((q - k).abs() // dilation <= window // 2)
    mask = masks.dilated(q_len, window=window, dilation=dilation, causal=causal, block=block)
    assert_keeps(mask, live)
    if dilation == 1:
        assert mask == masks.local(q_len, window=window, causal=causal, block=block)


@given(sizes(), lengths(2 * MOST), st.booleans(), st.data())
def test_global_tokens_see_and_are_seen_by_all(size, window, causal, data):
    q_len, block = size
    tokens = data.draw(st.lists(st.integers(0, q_len - 1), max_size=4))
    near = masks.local(q_len, window=window, causal=causal, block=block).to_dense()[0, 0]
    live = near.clone()
    for token in tokens:
        live[token] = True
        live[:, token] = True
    live = live.tril() if causal else live
    assert_keeps(masks.longformer(q_len, window=window, global_tokens=tokens, causal=causal, block=block), live)
    first = data.draw(st.integers(0, q_len + 3))
    assert masks.longformer(q_len, window=window, global_tokens=first, causal=causal, block=block) == masks.longformer(
        q_len, window=window, global_tokens=range(min(first, q_len)), causal=causal, block=block
    )


@given(sizes(), lengths(2 * MOST), st.integers(0, 2 * MOST), st.integers(0, 2 * MOST))
def test_sinks_are_seen_besides_the_window(size, window, sink, last):
    q_len, block = size
    q, k = square(q_len)
    streaming = (k <= q) & ((q - k < window) | (k < sink))
    assert_keeps(masks.streaming(q_len, window=window, sink=sink, block=block), streaming)
    assert_keeps(masks.a_shape(q_len, sink=sink, local=window - 1, block=block), streaming)
    foot = (k <= q) & (q >= q_len - last)
    assert_keeps(masks.tri_shape(q_len, sink=sink, local=window - 1, last=last, block=block), streaming | foot)


# ---------------------------------------------------------------------- vertical-slash


@given(sizes(), SEEDS)
def test_vertical_slash_keeps_columns_and_diagonals(size, seed):
    q_len, block = size
    rng = np.random.default_rng(seed)
    share = rng.choice([0.0, 0.02, 0.3, 1.0], 2)
    vertical, slash = (rng.permutation(q_len)[: int(s * q_len + rng.random())] for s in share)
    q, k = square(q_len)
    live = torch.zeros(q_len, q_len, dtype=torch.bool)
    for column in vertical:
        live |= k == column
    for distance in slash:
        live |= q - k == distance
    assert_keeps(masks.vertical_slash(q_len, vertical=vertical, slash=slash.tolist(), block=block), live & (k <= q))


@given(sizes(), SEEDS)
def test_vertical_slash_may_differ_by_head(size, seed):
    q_len, block = size
    rng = np.random.default_rng(seed)
    verticals = rng.integers(0, q_len, (3, 2))
    slashes = [[0], [0, q_len - 1], [0]]
    q, k = square(q_len)
    live = torch.stack(
        [
            (k <= q) & ((k == v[0]) | (k == v[1]) | torch.isin(q - k, torch.tensor(s)))
            for v, s in zip(verticals, slashes)
        ]
    )
    assert_heads(masks.vertical_slash(q_len, vertical=torch.from_numpy(verticals), slash=slashes, block=block), live)
    assert_heads(masks.vertical_slash(q_len, vertical=verticals.tolist(), slash=slashes, block=block), live)
    one = masks.vertical_slash(q_len, vertical=[[0], [0], [0]], slash=[0], block=block)
    assert one.pattern.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(
    ("vertical", "slash", "error", "message"),
    [
        ([100], [0], ValueError, r"vertical must lie in 0\.\.99; got 100\.\.100"),
        ([0], [-1, 3], ValueError, r"slash must lie in 0\.\.99; got -1\.\.3"),
        ([0.5], [0], TypeError, r"vertical must be a list of integers; got torch.float32 of shape \[1\]"),
        ([0], 3, TypeError, r"slash must be a list of integers; got torch.int64 of shape \[\]"),
        ([[0], [1]], [[0]] * 3, ValueError, "must be given for equally many heads; got 2 and 3"),
    ],
)
def test_vertical_slash_refuses_indices_that_are_none(vertical, slash, error, message):
    with pytest.raises(error, match=message):
        masks.vertical_slash(100, vertical=vertical, slash=slash)

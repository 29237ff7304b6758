"""Patterns over sequences: each keeps exactly the scores of its formula, which is written here once more."""

import re

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mask_rules import BLOCKS, assert_keeps, grid
from sparseflash import BlockMask, masks
from sparseflash.masks.tiling.diagonals import diagonals
from sparseflash.masks.tiling.kinds import by_kind
from sparseflash.masks.tiling.spans import spans
from strategies import SEEDS, blocks, lengths

MOST = 150


def sizes():
    """`(q_len, block)`."""
    return st.tuples(lengths(MOST), blocks(BLOCKS))


def square(length):
    return grid(length, length)


def is_power_of_two(x):
    return (x > 0) & ((x & (x - 1)) == 0)


def assert_heads(mask, live):
    """As `assert_keeps`, for the heads `live` [H, Nq, Nk]."""
    mask.validate()
    assert mask == BlockMask.from_dense(live, block=(mask.block_q, mask.block_k))
    assert torch.equal(mask.to_dense()[0], live)


# ---------------------------------------------------------------------- what patterns are made of


@given(lengths(MOST), lengths(MOST), blocks(BLOCKS), SEEDS)
def test_spans_keeps_runs_and_marked_rows_and_columns_up_to_their_limit(q_len, k_len, block, seed):
    rng = np.random.default_rng(seed)
    most = rng.choice([1, 20, k_len + 5])
    start = torch.from_numpy(rng.integers(-5, k_len + 5, q_len))
    stop = start + torch.from_numpy(rng.integers(-3, most + 1, q_len))
    limit = torch.from_numpy(rng.integers(-5, k_len + 5, q_len))
    rows, cols = (torch.from_numpy(rng.random(n) < rng.choice([0, 0.02, 0.5, 1])) for n in (q_len, k_len))
    q, k = grid(q_len, k_len)
    run = (start[q] <= k) & (k < stop[q])
    assert_keeps(spans(start, stop, k_len, block=block), run)
    marked = rows[q] | cols[k]
    assert_keeps(spans(start, stop, k_len, rows=rows, cols=cols, block=block), run | marked)
    limited = run | (marked & (k < limit[q]))
    assert_keeps(spans(start, stop, k_len, limit=limit, rows=rows, cols=cols, block=block), limited)


@given(sizes(), SEEDS)
def test_diagonals_keeps_a_set_of_distances(size, seed):
    q_len, block = size
    rng = np.random.default_rng(seed)
    there = torch.from_numpy(rng.random(2 * q_len + 21) < rng.choice([0.01, 0.1, 0.9]))
    offsets = there.nonzero()[:, 0] - (q_len + 10)  # some past the ends
    q, k = square(q_len)
    assert_keeps(diagonals(offsets, q_len, block=block), torch.isin(q - k, offsets))


@given(lengths(MOST), lengths(MOST), blocks(BLOCKS), st.integers(1, 20))
def test_by_kind_asks_about_one_tile_of_each_kind(q_len, k_len, block, period):
    rows, cols = every_tile(q_len, k_len, block)
    codes = [rows * block[0] % period, cols * block[1] % period]
    asked = []

    def live(some):
        asked.extend(some.tolist())
        q, k = tokens_of_tiles(rows[some], cols[some], block)
        return q % period == 3 * k % period

    q, k = torch.arange(q_len)[:, None], torch.arange(k_len)
    assert_keeps(by_kind(live, rows, cols, codes, q_len, k_len, block=block), q % period == 3 * k % period)
    kinds = list(zip(*(code.tolist() for code in codes)))
    assert sorted(asked) == [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]


@given(lengths(MOST), lengths(MOST), st.integers(1, 9), st.integers(-50, 50), blocks(BLOCKS))
def test_by_kind_takes_the_distance_of_tiles_for_a_rule_of_distances(q_len, k_len, step, shift, block):
    rows, cols = every_tile(q_len, k_len, block)

    def live(some):
        q, k = tokens_of_tiles(rows[some], cols[some], block)
        return (q + shift - k) % step == 0

    distance = rows * block[0] - cols * block[1]
    q, k = torch.arange(q_len)[:, None], torch.arange(k_len)
    assert_keeps(by_kind(live, rows, cols, [distance], q_len, k_len, block=block), (q + shift - k) % step == 0)


def test_by_kind_of_no_tiles_is_empty():
    none = torch.zeros(0, dtype=torch.int64)
    assert by_kind(lambda some: some, none, none, [none], 100, block=32) == BlockMask.from_dense(
        torch.zeros(100, 100, dtype=torch.bool), block=32
    )


def every_tile(q_len, k_len, block):
    pairs = torch.cartesian_prod(*(torch.arange(-(-n // b)) for n, b in zip((q_len, k_len), block)))
    return pairs[:, 0], pairs[:, 1]


def tokens_of_tiles(rows, cols, block):
    return rows[:, None, None] * block[0] + torch.arange(block[0])[:, None], (
        cols[:, None, None] * block[1] + torch.arange(block[1])
    )


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
    """`(lengths, k_lengths, block)`; not all of them empty."""
    pairs = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=6))
    pairs.insert(draw(st.integers(0, len(pairs))), (draw(st.integers(1, 60)), draw(st.integers(1, 60))))
    return [q for q, _ in pairs], [k for _, k in pairs], draw(blocks(BLOCKS))


@given(packed(), st.booleans())
@example(([1] * 200, [1] * 200, (16, 32)), False)
def test_documents_see_themselves_only(drawn, causal):
    lengths_q, lengths_k, block = drawn
    # One document after the other, by slices.
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


# ---------------------------------------------------------------------- Sparse Transformer, DeepSpeed


@given(sizes(), lengths(2 * MOST))
def test_strided_sees_the_latest_keys_and_every_so_manieth(size, stride):
    q_len, block = size
    q, k = square(q_len)
    local, far = (k <= q) & (q - k < stride), (k <= q) & ((q - k) % stride == 0)
    assert_keeps(masks.strided(q_len, stride=stride, attend="local", block=block), local)
    assert_keeps(masks.strided(q_len, stride=stride, attend="strided", block=block), far)
    assert_keeps(masks.strided(q_len, stride=stride, block=block), local | far)
    # Two steps, one of each kind, connect everything past.
    assert torch.equal((far.float() @ local.float()) > 0, torch.ones(q_len, q_len).tril() > 0)


@given(sizes(), st.integers(1, MOST), st.data())
def test_fixed_sees_its_chunk_and_the_summaries(size, stride, data):
    q_len, block = size
    num_verts = data.draw(st.integers(1, min(stride, 4)))
    summary = data.draw(st.integers(1, stride // num_verts))
    heads = data.draw(st.integers(1, 6))
    q, k = square(q_len)
    local = (k <= q) & (q // stride == k // stride)
    expected = {"local": [], "summary": [], "both": []}
    for head in range(heads if num_verts > 1 else 1):
        # Sub-blocks of the chunk from its end on, as in OpenAI's get_blocksparse_obj.
        chosen = list(range(stride - 1, -1, -1))[summary * (head % num_verts) :][:summary]
        columns = (k <= q) & torch.isin(k % stride, torch.tensor(chosen))
        expected["local"].append(local)
        expected["summary"].append(columns)
        expected["both"].append(local | columns)
    for attend, live in expected.items():
        mask = masks.fixed(
            q_len, stride=stride, summary=summary, attend=attend, heads=heads, num_verts=num_verts, block=block
        )
        assert_heads(mask, torch.stack(live))


def deepspeed_layout(count, local, wide, causal, horizontal, pattern, patterns):
    """DeepSpeed's FixedSparsityConfig.make_layout of one head, from its description."""
    layout = torch.zeros(count, count, dtype=torch.bool)
    for i in range(count):
        for j in range(count):
            layout[i, j] = i // local == j // local
    first = local - (1 + pattern % patterns) * wide
    starts = [chunk * local + first for chunk in range(count // local)]
    if count % local:
        starts.append(max(min(count // local * local + first, count - wide), 0))
    for start in starts:
        layout[:, start : start + wide] = True
        if horizontal:
            layout[start : start + wide] = True
    return layout.tril() if causal else layout


@given(st.integers(1, 260), st.sampled_from([(4, 1), (4, 2), (3, 1), (3, 3), (6, 2), (1, 1)]), st.data())
def test_deepspeed_fixed_has_global_blocks_in_every_chunk(q_len, local_and_wide, data):
    local, wide = local_and_wide
    causal = data.draw(st.booleans())
    horizontal = data.draw(st.booleans()) and not causal
    patterns = data.draw(st.integers(1, local // wide))
    heads = data.draw(st.integers(1, 5)) if patterns > 1 else 1
    count = -(-q_len // 16)
    live = torch.stack(
        [deepspeed_layout(count, local, wide, causal, horizontal, head, patterns) for head in range(heads)]
    )
    live = live.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, :q_len, :q_len]
    mask = masks.deepspeed_fixed(
        q_len, local_blocks=local, global_blocks=wide, causal=causal, horizontal=horizontal,
        heads=heads, global_patterns=patterns, block=16,
    )  # fmt: skip
    assert_heads(mask, live.tril() if causal else live)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("horizontal", [False, True])
@pytest.mark.parametrize("count", [4, 8, 11, 13])
def test_deepspeed_fixed_is_deepspeeds_own_layout(causal, horizontal, count):
    config = pytest.importorskip("deepspeed.ops.sparse_attention.sparsity_config", reason="DeepSpeed is not installed")
    if causal and horizontal:
        pytest.skip("DeepSpeed has no horizontal global attention with unidirectional attention")
    layout = config.FixedSparsityConfig(
        num_heads=4, block=16, different_layout_per_head=True, num_local_blocks=4, num_global_blocks=1,
        attention="unidirectional" if causal else "bidirectional", horizontal_global_attention=horizontal,
        num_different_global_patterns=4,
    ).make_layout(16 * count)  # fmt: skip
    mask = masks.deepspeed_fixed(
        16 * count, causal=causal, horizontal=horizontal, heads=4, global_patterns=4,
        block=16,
    )  # fmt: skip
    tiles = mask.to_dense()[0].view(4, count, 16, count, 16).any(4).any(2)
    assert torch.equal(tiles, layout.bool())


# ---------------------------------------------------------------------- logarithmic, hierarchical


@given(sizes(), st.integers(1, 12), st.none() | st.integers(0, MOST))
def test_log_sparse_sees_keys_at_powers_of_two(size, window, more):
    q_len, block = size
    restart = None if more is None else window + more
    distances = set()
    for base in range(0, q_len, restart or q_len):
        end = base + (restart or q_len)
        distances |= set(range(base, min(base + window, end)))
        distances |= {d for p in range(12) if (d := base + window - 1 + 2**p) < end}
    q, k = square(q_len)
    live = torch.isin(q - k, torch.tensor(sorted(distances)))
    assert_keeps(masks.log_sparse(q_len, window=window, restart=restart, block=block), live)


@pytest.mark.parametrize("q_len", [1, 2, 3, 40, 64, 65, 128])
def test_log_sparse_reaches_the_past_in_log2_layers(q_len):
    step = masks.log_sparse(q_len, block=16).to_dense()[0, 0].float()
    reach = torch.eye(q_len)
    for _ in range((q_len - 1).bit_length()):
        reach = ((reach @ step) > 0).float()
    assert torch.equal(reach, torch.ones(q_len, q_len).tril())


def far_fields(count):
    """`{(i, j): m}` for every pair of blocks at least two apart, by walking down from the coarsest cells."""
    level_of = {}

    def visit(level, a, b):
        if a << level >= count or b << level >= count:
            return
        if abs(a - b) >= 2:
            for i in range(a << level, min((a + 1) << level, count)):
                for j in range(b << level, min((b + 1) << level, count)):
                    assert (i, j) not in level_of
                    level_of[i, j] = level
        elif level > 0:
            for child in range(4):
                visit(level - 1, 2 * a + child // 2, 2 * b + child % 2)

    visit(10, 0, 0)
    return level_of


@given(st.integers(1, 40), st.integers(0, 15), st.booleans(), st.none() | st.integers(0, 5))
def test_hierarchical_sees_near_blocks_and_one_of_each_far_cell(count, missing, causal, levels):
    level_of = far_fields(count)
    most = 1 + max(level_of.values(), default=-1)
    if levels is not None and levels > most:
        return
    layout = torch.zeros(count, count, dtype=torch.bool)
    for i in range(count):
        for j in range(count):
            if abs(i - j) <= 1:
                layout[i, j] = True
            elif levels is None or level_of[i, j] < levels:
                cell = 2 ** level_of[i, j]
                layout[i, j] = j == min(j // cell * cell + cell, count) - 1
    live = layout.repeat_interleave(16, 0).repeat_interleave(16, 1)[: 16 * count - missing, : 16 * count - missing]
    mask = masks.hierarchical(16 * count - missing, levels=levels, causal=causal, block=16)
    assert_keeps(mask, live.tril() if causal else live)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5, 8, 21, 40])
def test_hierarchical_reaches_everything_within_log2_layers_or_so(count, causal):
    reach = reached([masks.hierarchical(16 * count, causal=causal, block=16)] * (count.bit_length() + 1))
    want = torch.ones(count, count, dtype=torch.bool)
    assert torch.equal(reach, want.tril() if causal else want)


# ---------------------------------------------------------------------- butterflies


def reached(layers):
    """Bool `[nb, nb]`: whether block i hears of block j after layers with these masks, first to last."""
    reach = torch.eye(layers[0].blocks[0], dtype=torch.bool)
    for mask in layers:
        layout = torch.zeros_like(reach)
        rows = torch.repeat_interleave(torch.arange(len(layout)), mask.indptr.diff().long())
        layout[rows, mask.indices.long()] = True
        reach = (layout.float() @ reach.float()) > 0
    return reach


def digits(x, radix):
    """The lowest 12 digits, int `[..., 12]`."""
    return torch.stack([x // radix**n % radix for n in range(12)], -1)


def one_stride_away(i, j, radix, strides, causal):
    found = torch.zeros(torch.broadcast_shapes(i.shape, j.shape), dtype=torch.bool)
    for stride in strides:
        if causal:
            found |= torch.isin(i - j, torch.arange(1, radix) * stride)
        else:
            differ = digits(i, radix) != digits(j, radix)
            at = next(n for n in range(12) if radix**n == stride)
            found |= differ[..., at] & (differ.sum(-1) == 1)
    return found


@given(st.integers(1, 40), st.integers(0, 15), st.integers(2, 6), st.booleans(), st.data())
def test_butterfly_of_any_radix_strides_global_blocks_and_layer(count, missing, radix, causal, data):
    q_len = 16 * count - missing
    there = [radix**n for n in range(6) if radix**n < count]
    strides = data.draw(st.lists(st.sampled_from(there), max_size=4)) if there else []
    global_blocks = data.draw(st.integers(0, 2) | st.just(count + 1))
    layer = data.draw(st.none() | st.integers(0, 7))
    q, k = square(q_len)
    i, j = q // 16, k // 16
    chosen = strides if layer is None else strides[layer % len(strides) :][:1] if strides else []
    live = (i == j) | one_stride_away(i, j, radix, chosen, causal) | (i < global_blocks) | (j < global_blocks)
    mask = masks.butterfly(
        q_len, block=16, causal=causal, radix=radix, strides=strides, global_blocks=global_blocks, layer=layer
    )
    assert_keeps(mask, live & (k <= q) if causal else live)
    factors = data.draw(st.integers(0, len(there)))
    assert masks.butterfly(q_len, block=16, causal=causal, radix=radix, factors=factors) == masks.butterfly(
        q_len, block=16, causal=causal, radix=radix, strides=there[:factors]
    )


@pytest.mark.parametrize("radix", [3, 4, 7])
@pytest.mark.parametrize("count", range(1, 41))
def test_truncated_butterfly_of_any_radix_reaches_everything_in_its_log_many_layers(count, radix):
    layers = max(1, next(n for n in range(9) if radix**n >= count))
    everything = torch.ones(count, count, dtype=torch.bool)
    assert reached([masks.butterfly(16 * count, block=16, radix=radix)] * layers).all()
    causal = masks.butterfly(16 * count, block=16, radix=radix, causal=True)
    assert torch.equal(reached([causal] * layers), everything.tril())


@pytest.mark.parametrize("radix", [2, 3])
@pytest.mark.parametrize("count", range(1, 41))
def test_staged_butterfly_reaches_everything_in_a_round_or_two(count, radix):
    layers = next(n for n in range(9) if radix**n >= count)
    rounds = 1 if radix**layers == count else 2
    stages = [masks.butterfly(16 * count, block=16, radix=radix, layer=n) for n in range(max(rounds * layers, 1))]
    assert reached(stages).all()
    stages = [masks.butterfly(16 * count, block=16, radix=radix, layer=n, causal=True) for n in range(max(layers, 1))]
    assert torch.equal(reached(stages), torch.ones(count, count, dtype=torch.bool).tril())


@pytest.mark.parametrize("count", range(2, 41))
def test_every_block_of_a_truncated_butterfly_has_a_partner(count):
    counts = masks.butterfly(16 * count, block=16).indptr.diff()
    assert int(counts.min()) >= 2


@st.composite
def images(draw):
    """`(height, width)` of at most about 400 pixels."""
    width = draw(st.sampled_from([1, 2, 3, 16, 32, 33, 64, 100]) | st.integers(1, 40))
    return draw(st.integers(1, max(1, 400 // width))), width


@given(images(), st.integers(1, 5), st.integers(1, 20), st.integers(2, 4), blocks((16, 32, 64)), st.data())
@example((6, 64), 1, 1, 2, (16, 32), None)
@example((20, 17), 2, 1, 3, (64, 16), None)
@example((300, 1), 1, 1, 2, (64, 64), None)
def test_butterfly_2d_is_the_product_of_rows_and_columns(image, cell_h, cell_w, radix, block, data):
    height, width = image
    nodes = -(-height // cell_h), -(-width // cell_w)
    there = [[radix**n for n in range(12) if radix**n < side] for side in nodes]
    factors = data and tuple(data.draw(st.integers(0, len(strides))) for strides in there)
    if factors:
        there = [strides[:count] for strides, count in zip(there, factors)]
    axis = [torch.arange(side) for side in nodes]
    rows, cols = (
        (x[:, None] == x) | one_stride_away(x[:, None], x[None, :], radix, strides, False)
        for x, strides in zip(axis, there)
    )
    rows = rows.repeat_interleave(cell_h, 0).repeat_interleave(cell_h, 1)[:height, :height]
    cols = cols.repeat_interleave(cell_w, 0).repeat_interleave(cell_w, 1)[:width, :width]
    mask = masks.butterfly_2d(height, width, cell=(cell_h, cell_w), factors=factors, radix=radix, block=block)
    assert_keeps(mask, torch.kron(rows, cols))


# ---------------------------------------------------------------------- all of them


CAUSAL = {
    "prefix_lm": lambda n, **block: masks.prefix_lm(n, prefix=0, **block),
    "documents": lambda n, **block: masks.documents([n // 2, n - n // 2], causal=True, **block),
    "chunked": lambda n, **block: masks.chunked(n, chunk=37, causal=True, **block),
    "dilated": lambda n, **block: masks.dilated(n, window=20, dilation=3, causal=True, **block),
    "longformer": lambda n, **block: masks.longformer(
        n, window=9, global_tokens=[0, n // 2, n - 1], causal=True, **block
    ),
    "streaming": lambda n, **block: masks.streaming(n, window=11, sink=3, **block),
    "a_shape": lambda n, **block: masks.a_shape(n, sink=3, local=11, **block),
    "tri_shape": lambda n, **block: masks.tri_shape(n, sink=3, local=11, last=20, **block),
    "vertical_slash": lambda n, **block: masks.vertical_slash(
        n, vertical=[0, n // 2, n - 1], slash=[0, n // 3], **block
    ),
    "strided": lambda n, **block: masks.strided(n, stride=12, **block),
    "fixed": lambda n, **block: masks.fixed(n, stride=12, summary=3, heads=3, num_verts=2, **block),
    "log_sparse": lambda n, **block: masks.log_sparse(n, window=3, restart=50, **block),
}
CAUSAL_IN_BLOCKS = {
    "butterfly": lambda n, **block: masks.butterfly(n, causal=True, radix=3, global_blocks=2, **block),
    "butterfly, layer": lambda n, **block: masks.butterfly(n, causal=True, layer=1, **block),
    "deepspeed_fixed": lambda n, **block: masks.deepspeed_fixed(n, causal=True, global_blocks=2, **block),
    "hierarchical": lambda n, **block: masks.hierarchical(n, causal=True, **block),
}
SYMMETRIC = {
    "dense": masks.dense,
    "documents": lambda n, **block: masks.documents([n // 2, n - n // 2], **block),
    "chunked": lambda n, **block: masks.chunked(n, chunk=37, **block),
    "dilated": lambda n, **block: masks.dilated(n, window=20, dilation=3, **block),
    "longformer": lambda n, **block: masks.longformer(n, window=9, global_tokens=2, **block),
    "butterfly_2d": lambda n, **block: masks.butterfly_2d(n, 3, **block),
}


@pytest.mark.parametrize("name", CAUSAL | CAUSAL_IN_BLOCKS)
@pytest.mark.parametrize("q_len", [1, 31, 32, 33, 150])
def test_causal_patterns_never_see_the_future(name, q_len):
    build = (CAUSAL | CAUSAL_IN_BLOCKS)[name]
    assert not build(q_len, block=16).to_dense().triu(1).any()


@pytest.mark.parametrize("name", SYMMETRIC)
@pytest.mark.parametrize("q_len", [1, 31, 33, 150])
def test_bidirectional_patterns_are_symmetric(name, q_len):
    dense = SYMMETRIC[name](q_len, block=16).to_dense()
    assert torch.equal(dense, dense.mT)


@pytest.mark.parametrize("name", CAUSAL | SYMMETRIC)
def test_patterns_on_tokens_hold_the_same_scores_in_every_block(name):
    build = (SYMMETRIC | CAUSAL)[name]
    assert torch.equal(build(133, block=(16, 64)).to_dense(), build(133, block=(128, 32)).to_dense())


@pytest.mark.parametrize("name", sorted((SYMMETRIC | CAUSAL).keys() - {"documents", "butterfly_2d"}))
def test_patterns_refuse_lengths_and_blocks_that_are_none(name):
    build = (SYMMETRIC | CAUSAL)[name]
    with pytest.raises(ValueError, match="block must be one of"):
        build(100, block=24)
    with pytest.raises(ValueError, match=r"q_len must be between 1 and 2\^31 - 257 tokens; got -7"):
        build(-7, block=16)


@pytest.mark.parametrize("name", CAUSAL_IN_BLOCKS)
def test_patterns_on_blocks_refuse_rectangular_ones(name):
    with pytest.raises(TypeError, match=r"block must be an int \(.* blocks are square\); got \(16, 32\)"):
        CAUSAL_IN_BLOCKS[name](100, block=(16, 32))


REFUSED = [
    ("prefix_lm(100, prefix=-1)", "prefix must be at least 0 tokens; got -1"),
    ("chunked(100, chunk=0)", "chunk must be at least 1 token; got 0"),
    ("local(100)", "local must have window=, or left= and right=; got none of them."),
    ("local(100, left=3)", "local must have either window or both of left and right, without causal"),
    ("local(100, window=5, right=3)", "got window=5, causal=False, left=None, right=3"),
    ("local(100, left=3, right=0, causal=True)", "without causal (right=0 is causal); got"),
    ("local(100, left=-1, right=0)", "left must be at least 0 keys; got -1"),
    ("local(100, left=1, right=-1)", "right must be at least 0 keys; got -1"),
    ("dilated(100, window=0, dilation=1)", "window must be at least 1 key; got 0"),
    ("dilated(100, window=3, dilation=0)", "dilation must be at least 1 token; got 0"),
    ("longformer(100, window=0, global_tokens=1)", "window must be at least 1 key; got 0"),
    ("longformer(100, window=3, global_tokens=-1)", "global_tokens must be at least 0 tokens; got -1"),
    ("longformer(100, window=3, global_tokens=[4, 100])", "global_tokens must lie in 0..99; got 4..100"),
    ("longformer(100, window=3, global_tokens=1.5)", "global_tokens must be an integer number of tokens; got 1.5"),
    (
        "longformer(100, window=3, global_tokens=[1.5])",
        "global_tokens must be a list of integers; got torch.float32 of shape [1]",
    ),
    ("longformer(100, window=3, global_tokens=[1, [2]])", "global_tokens must be a list of integers; got [1, [2]]"),
    ("streaming(100, window=0, sink=1)", "window must be at least 1 key; got 0"),
    ("streaming(100, window=1, sink=-1)", "sink must be at least 0 keys; got -1"),
    ("a_shape(100, sink=-1, local=3)", "sink must be at least 0 keys; got -1"),
    ("a_shape(100, sink=1, local=-1)", "local must be at least 0 keys; got -1"),
    ("tri_shape(100, sink=1, local=1, last=-1)", "last must be at least 0 queries; got -1"),
    ("strided(100, stride=0)", "stride must be at least 1 token; got 0"),
    ("strided(100, stride=5, attend='all')", "attend must be one of 'both', 'local', 'strided'; got 'all'"),
    ("fixed(100, stride=5, summary=0)", "summary must be at least 1 token; got 0"),
    (
        "fixed(100, stride=5, summary=1, attend='strided')",
        "attend must be one of 'both', 'local', 'summary'; got 'strided'",
    ),
    ("fixed(100, stride=5, summary=3, num_verts=2)", "num_verts * summary must not exceed stride, 5 tokens; got 2 * 3"),
    ("fixed(100, stride=5, summary=3, heads=0)", "heads must be at least 1 head; got 0"),
    ("fixed(100, stride=5, summary=3, num_verts=0)", "num_verts must be at least 1 sub-block; got 0"),
    ("deepspeed_fixed(100, global_blocks=3)", "global_blocks must divide local_blocks, 4; got 3"),
    ("deepspeed_fixed(100, local_blocks=0)", "local_blocks must be at least 1 block; got 0"),
    (
        "deepspeed_fixed(100, global_blocks=2, global_patterns=3)",
        "global_patterns must be at most local_blocks // global_blocks, 2; got 3",
    ),
    (
        "deepspeed_fixed(100, causal=True, horizontal=True)",
        "horizontal must be False with causal; got True",
    ),
    ("log_sparse(100, window=0)", "window must be at least 1 key; got 0"),
    ("log_sparse(100, window=5, restart=4)", "restart must be at least 5 tokens; got 4"),
    ("hierarchical(160, levels=4, block=16)", "levels must lie between 0 and 3 for 10 blocks of 16; got 4"),
    ("hierarchical(160, levels=-1, block=16)", "levels must lie between 0 and 3 for 10 blocks of 16; got -1"),
    ("butterfly(100, radix=1)", "radix must be at least 2; got 1"),
    ("butterfly(100, strides=2)", "strides must be a list of integers; got torch.int64 of shape []"),
    ("butterfly(100, global_blocks=-1)", "global_blocks must be at least 0 blocks; got -1"),
    ("butterfly(100, layer=-1)", "layer must be at least 0 layers; got -1"),
    ("butterfly(100, block=16, strides=[3])", "strides must be among [1, 2, 4] for 7 blocks of 16, radix 2; got [3]"),
    ("butterfly(100, block=16, radix=3, strides=[9])", "strides must be among [1, 3] for 7 blocks of 16, radix 3"),
    ("butterfly(100, strides=[1], factors=1)", "factors must not be given beside strides; got factors=1 and"),
    ("butterfly_2d(0, 3)", "height must be at least 1 pixel; got 0"),
    ("butterfly_2d(3, 0)", "width must be at least 1 pixel; got 0"),
    ("butterfly_2d(3, 3, cell=0)", "cell must be at least 1 pixel; got 0"),
    ("butterfly_2d(3, 3, cell=(1, 2, 3))", "cell must be a number or a pair of them; got (1, 2, 3)"),
    ("butterfly_2d(3, 3, radix=1)", "radix must be at least 2; got 1"),
    ("butterfly_2d(8, 3, factors=3)", "factors must lie between 0 and 2 for 3 columns of cells; got 3"),
    ("butterfly_2d(8, 3, cell=3, factors=(3, 0))", "factors must lie between 0 and 2 for 3 rows of cells; got 3"),
    ("butterfly_2d(3, 3, factors=1.5)", "factors must be an integer number of strides; got 1.5"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[call for call, _ in REFUSED])
def test_patterns_refuse_numbers_that_make_no_sense(call, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        eval(f"masks.{call}", {"masks": masks})


@pytest.mark.parametrize("name", ["streaming", "tri_shape", "dilated", "strided", "butterfly", "deepspeed_fixed"])
def test_stored_bits_do_not_grow_with_the_length(name):
    build = (CAUSAL | CAUSAL_IN_BLOCKS)[name]
    assert len(build(2**14).bits) == len(build(2**11).bits)


MILLION = {
    "documents": lambda n: masks.documents([1000] * (n // 1000), causal=True),
    "chunked": lambda n: masks.chunked(n, chunk=4096),
    "local": lambda n: masks.local(n, left=4095, right=0),
    "dilated": lambda n: masks.dilated(n, window=512, dilation=8),
    "longformer": lambda n: masks.longformer(n, window=512, global_tokens=16),
    "streaming": lambda n: masks.streaming(n, window=4096, sink=4),
    "butterfly": lambda n: masks.butterfly(n, radix=4, global_blocks=4),
    "butterfly_2d": lambda n: masks.butterfly_2d(1024, n // 1024),
    "log_sparse": lambda n: masks.log_sparse(n, window=20),
    "hierarchical": lambda n: masks.hierarchical(n),
}


@pytest.mark.parametrize("name", MILLION)
def test_a_million_tokens_need_no_more_than_their_live_tiles(name):
    mask = MILLION[name](2**20)
    assert len(mask.tile) < 50 * 8192
    assert mask.nbytes < 16e6

"""Patterns chosen from the data: each keeps what its formula says, waits for nothing, and passes no gradient on."""

import functools
import importlib
import itertools
import math
import os
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import BlockMask, attention, masks
from sparseflash.backends.problem import Problem
from sparseflash.backends.triton.schedule.plan import plan_of
from sparseflash.masks import chosen_keys, fused
from strategies import SEEDS, blocks, lengths
from waiting import NoWaiting, waiting_raises

antidiagonal = importlib.import_module("sparseflash.masks.antidiagonal_scores")  # the name is the function's, too

MOST = 150
BLOCKS = (16, 32, 64)


# Two ways to the same choice: see masks/fused. Triton's interpreter runs the kernels here.
WAYS = st.sampled_from(["operations", "kernels"])
INTEGERS = st.sampled_from(
    [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8]
)


def by(way):
    """Makes CPU tensors go one of the ways."""
    return mock.patch.object(fused, "_DEVICES", ["cpu"] if way == "kernels" else [])


def generator(seed):
    return torch.Generator().manual_seed(seed)


def coarse(shape, seed):
    """Scores with many ties, a few -inf and NaN and +inf."""
    scores = torch.randint(0, 4, shape, generator=generator(seed)).float()
    special = torch.rand(shape, generator=generator(seed + 1))
    scores[special < 0.15] = -torch.inf
    scores[special < 0.05] = torch.nan
    scores[special > 0.95] = torch.inf
    return scores


def distinct(shape, seed):
    return torch.randn(shape, generator=generator(seed))


def tokens_of(layout, q_len, k_len, block):
    """Bool `[..., Nq, Nk]`: whether a score's tile is in `layout`."""
    i, j = torch.arange(q_len) // block[0], torch.arange(k_len) // block[1]
    return layout[..., i[:, None], j]


def causal_tokens(q_len, k_len):
    return torch.arange(k_len) <= torch.arange(q_len)[:, None] + (k_len - q_len)


def tiles_with(live, block):
    """Bool `[Mq, Mk]`: the tiles with a live score."""
    (q_len, k_len), (block_q, block_k) = live.shape, block
    rows = [live[i : i + block_q] for i in range(0, q_len, block_q)]
    return torch.tensor([[bool(r[:, j : j + block_k].any()) for j in range(0, k_len, block_k)] for r in rows])


def assert_keeps(mask, live, block):
    """The mask is dynamic, safe to run, and keeps exactly these scores, `[B, H, Nq, Nk]`."""
    assert mask.dynamic
    mask.validate()
    assert mask.shape == live.shape
    wrong = (mask.to_dense() != live).nonzero()
    assert len(wrong) == 0, f"differs first at (b, h, q, k) = {wrong[0].tolist()}"
    assert mask == BlockMask.from_dense(live, block=block)


@st.composite
def sizes(draw):
    block = draw(blocks(BLOCKS))
    q_len = draw(lengths(MOST, block[0]))
    k_len = draw(st.just(q_len) | lengths(MOST, block[1]))
    return q_len, k_len, block


def blocks_of(q_len, k_len, block):
    return -(-q_len // block[0]), -(-k_len // block[1])


def forced_tiles(q_len, k_len, block, causal, sink, local):
    """Written tile by tile, from the diagonal key of each query."""
    rows, cols = blocks_of(q_len, k_len, block)
    forced = torch.zeros(rows, cols, dtype=torch.bool)
    for i in range(rows):
        queries = range(i * block[0], min((i + 1) * block[0], q_len))
        own = {math.floor((q + k_len - q_len) / block[1]) for q in queries}
        for j in range(cols):
            near = any(j > o - local and (j <= o if causal else j < o + local) for o in own)
            forced[i, j] = j < sink or (local > 0 and near)
    if causal:
        forced &= tiles_with(causal_tokens(q_len, k_len), block)
    return forced


@st.composite
def choices(draw):
    """`(sizes, shape of the scores, keyword arguments, tiles that may be chosen, forced tiles)`"""
    q_len, k_len, block = draw(sizes())
    causal = draw(st.booleans())
    sink, local = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 1), (1, 2), (2, 1)]))
    shape = draw(st.sampled_from([(), (3,), (2, 2), (1, 3)])) + blocks_of(q_len, k_len, block)
    live = causal_tokens(q_len, k_len) if causal else torch.ones(q_len, k_len, dtype=torch.bool)
    arguments = {
        "q_len": q_len, "k_len": k_len, "block": block, "causal": causal, "sink_blocks": sink, "local_blocks": local,
    }  # fmt: skip
    return shape, arguments, live, forced_tiles(q_len, k_len, block, causal, sink, local)


def as_four(x):
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def rows_of(scores, arguments, live, forced):
    """Each row of scores with its index, which columns may be kept by score, and which are forced."""
    may = tiles_with(live, arguments["block"])
    scores = as_four(scores)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, scores.shape[:3])).tolist():
        row = scores[b, h, i].tolist()
        by_score = [j for j, s in enumerate(row) if may[i, j] and not forced[i, j] and s > -math.inf]
        yield (b, h, i), row, sorted(by_score, key=lambda j: (-row[j], j)), forced[i].nonzero().flatten().tolist()


# ---------------------------------------------------------------------- top-k blocks


@given(choices(), st.integers(0, 5), st.sampled_from([coarse, distinct]), SEEDS, WAYS)
def test_top_k_keeps_the_highest_blocks_of_each_row_and_the_first_of_equals(drawn, extra, values, seed, way):
    shape, arguments, live, forced = drawn
    scores = values(shape, seed)
    k = max(1, int(forced.sum(1).max())) + extra  # may be more than there are
    layout = torch.zeros(as_four(scores).shape, dtype=torch.bool)
    for at, _, ranked, always in rows_of(scores, arguments, live, forced):
        layout[at][[*always, *ranked[: k - len(always)]]] = True
    expected = tokens_of(layout, arguments["q_len"], arguments["k_len"], arguments["block"]) & live
    with by(way):
        mask = masks.top_k_blocks(scores, k=k, **arguments)
    assert_keeps(mask, expected, arguments["block"])


def test_top_k_has_room_for_k_tiles_a_row_and_no_more():
    scores = distinct((2, 3, 8, 8), seed=0)
    assert len(masks.top_k_blocks(scores, k=3, q_len=128, block=16).indices) == 6 * 8 * 3
    causal = masks.top_k_blocks(scores, k=3, q_len=128, block=16, causal=True)
    assert len(causal.indices) == 6 * (1 + 2 + 3 * 6) == causal.indptr[-1]


# ---------------------------------------------------------------------- mass


@given(choices(), st.floats(0.01, 1.0), st.none() | st.integers(0, 3), SEEDS, WAYS)
def test_mass_keeps_the_fewest_blocks_that_hold_the_share(drawn, mass, extra, seed, way):
    shape, arguments, live, forced = drawn
    scores = distinct(shape, seed)
    least = max(1, int(forced.sum(1).max()))
    most = shape[-1] if extra is None else least + extra
    layout = torch.zeros(as_four(scores).shape, dtype=torch.bool)
    for at, row, ranked, always in rows_of(scores, arguments, live, forced):
        weight = {j: math.exp(row[j]) for j in (*always, *ranked)}
        held, total = 0.0, sum(weight.values())
        for j in (*always, *ranked)[:most]:
            if abs(held - mass * total) < 1e-5 * total and mass < 1.0 and j not in always:
                return  # too near to say in fp32
            if held < mass * total or mass == 1.0 or j in always:
                layout[at][j] = True
            held += weight[j]
    expected = tokens_of(layout, arguments["q_len"], arguments["k_len"], arguments["block"]) & live
    given_most = None if extra is None else most
    with by(way):
        mask = masks.mass_blocks(scores, mass=mass, most=given_most, **arguments)
    assert_keeps(mask, expected, arguments["block"])


@given(choices(), st.sampled_from([0.3, 0.9, 1.0]), SEEDS, WAYS)
def test_mass_never_keeps_what_scores_nothing(drawn, mass, seed, way):
    shape, arguments, live, forced = drawn
    scores = coarse(shape, seed)
    with by(way):
        mask = masks.mass_blocks(scores, mass=mass, **arguments)
    mask.validate()
    usable = (as_four(scores) > -torch.inf) | forced  # NaN is not
    dense = mask.to_dense()
    expected = tokens_of(usable, arguments["q_len"], arguments["k_len"], arguments["block"]) & live
    assert not (dense & ~expected).any()
    if mass == 1.0:
        assert torch.equal(dense, expected)


@pytest.mark.parametrize("way", ["operations", "kernels"])
def test_no_score_is_as_high_as_that_of_a_block_that_is_always_kept(way):
    with by(way):
        scores = torch.tensor([[torch.inf, torch.inf, torch.inf, torch.nan]])
        always = {"q_len": 16, "k_len": 64, "block": 16, "local_blocks": 1}  # the last one
        assert masks.top_k_blocks(scores, k=2, **always).canonical().indices.tolist() == [0, 3]
        assert masks.mass_blocks(scores, mass=0.5, **always).canonical().indices.tolist() == [0, 1, 3]


@pytest.mark.parametrize("way", ["operations", "kernels"])
def test_equal_blocks_are_kept_from_the_first(way):
    with by(way):
        mask = masks.mass_blocks(torch.zeros(1, 8), mass=0.5, q_len=16, k_len=128, block=16)
        assert mask.canonical().indices.tolist() == [0, 1, 2, 3]


def test_more_mass_keeps_more():
    scores = 3 * distinct((4, 16, 16), seed=1)
    kept = [
        masks.mass_blocks(scores, mass=m, q_len=256, block=16, causal=True).to_dense()
        for m in (0.1, 0.5, 0.9, 0.99, 1.0)
    ]
    for less, more in itertools.pairwise(kept):
        assert not (less & ~more).any() and (more & ~less).any()
    assert torch.equal(kept[-1], masks.causal(256, block=16).to_dense().expand(1, 4, -1, -1))


def test_mass_is_of_the_softmax_and_not_of_the_exponentials():
    scores = distinct((6, 6), seed=2)
    for shift in (-1e4, 300.0):  # whose exponentials are 0 and infinite
        shifted = scores.double() + shift
        mask = masks.mass_blocks(shifted, mass=0.7, q_len=96, block=16)
        assert mask == masks.mass_blocks(scores.double(), mass=0.7, q_len=96, block=16)


@given(choices(), st.sampled_from([0.2, 0.7, 1.0, None]), st.booleans(), SEEDS)
def test_kernels_choose_what_operations_choose(drawn, mass, half, seed):
    shape, arguments, _, forced = drawn
    scores = coarse(shape, seed)  # with few values, so that no sum of shares falls near the mass by chance
    scores = scores.half() if half else scores
    k = max(1, int(forced.sum(1).max())) + 1
    found = []
    for way in ("operations", "kernels"):
        with by(way):
            if mass is None:
                found.append(masks.top_k_blocks(scores, k=k, group=2, **arguments))
            else:
                found.append(masks.mass_blocks(scores, mass=mass, most=k, group=2, **arguments))
        found[-1].validate()
    assert found[0] == found[1]


def test_long_rows_are_compared_a_part_at_a_time():
    scores = torch.randint(0, 300, (1, 3, 700), generator=generator(0)).float()
    sizes = {"q_len": 48, "k_len": 11_200, "block": 16, "causal": True, "sink_blocks": 1}
    found = []
    for way in ("operations", "kernels"):
        with by(way):
            best, held = masks.top_k_blocks(scores, k=300, **sizes), masks.mass_blocks(scores / 40, mass=0.8, **sizes)
        found.append((best, held))
    assert found[0] == found[1]


def test_what_the_kernels_leave_to_the_operations():
    with by("kernels"):
        assert fused.serves(SCORES, 4, 4)
        assert not fused.serves(SCORES, 4, fused.LONGEST_ROW + 1)
        assert not fused.serves(torch.nn.Parameter(SCORES), 4, 4)
    assert not fused.serves(SCORES, 4, 4)  # it lies on the CPU


# ---------------------------------------------------------------------- keys of each query


@st.composite
def key_choices(draw):
    q_len, k_len, block = draw(sizes())
    leading = draw(st.sampled_from([(), (2,), (2, 2)]))
    return (*leading, q_len), k_len, block, draw(st.sampled_from([1, 1, 2, 8, 16, 32, 64, 128])), draw(st.booleans())


def live_of_indices(indices, k_len, span, causal):
    runs = torch.arange(k_len) // span
    live = (indices.unsqueeze(-1) == runs).any(-2)
    return as_four(live & causal_tokens(live.shape[-2], k_len) if causal else live)


# The numbers of the runs do not all fit the narrow types, nor do those of the columns of a table of them.
@given(key_choices(), st.integers(1, 9), INTEGERS, SEEDS, WAYS)
@example(((16,), 4080, (16, 16), 16, False), 1, torch.uint8, 0, "operations")
@example(((16,), 4095, (16, 32), 32, True), 3, torch.uint8, 0, "operations")
@example(((16,), 4095, (16, 32), 32, True), 3, torch.uint8, 0, "kernels")
@example(((16,), 300, (16, 64), 1, False), 9, torch.uint8, 0, "operations")
@example(((16,), 2048, (16, 16), 16, False), 3, torch.int8, 0, "operations")
@example(((16,), 640_000, (16, 16), 16, False), 3, torch.int16, 0, "operations")
@example(((16,), 640_000, (16, 16), 16, False), 3, torch.uint16, 0, "operations")
def test_selected_keys_are_live_however_often_they_are_named(drawn, count, dtype, seed, way):
    shape, k_len, block, span, causal = drawn
    runs = -(-k_len // span)
    numbers = torch.randint(-2, runs + 2, (*shape, count), generator=generator(seed))
    indices = numbers.clamp(torch.iinfo(dtype).min, min(torch.iinfo(dtype).max, runs + 1)).to(dtype)
    with by(way):
        mask = masks.selected_keys(indices, k_len=k_len, block=block, span=span, causal=causal)
    assert_keeps(mask, live_of_indices(indices.to(torch.int64), k_len, span, causal), block)


@given(key_choices(), st.integers(1, 9), SEEDS, st.sampled_from([coarse, distinct]))
def test_top_k_keys_are_the_highest_of_each_query_and_the_first_of_equals(drawn, k, seed, values):
    shape, k_len, block, span, causal = drawn
    q_len, runs = shape[-1], -(-k_len // span)
    scores = values((*shape, runs), seed)
    indices = torch.full((*shape, k), -1)
    for at in torch.cartesian_prod(*map(torch.arange, shape)).view(-1, len(shape)).tolist():
        row = scores[tuple(at)].tolist()
        last = at[-1] + k_len - q_len
        usable = [r for r in range(runs) if row[r] > -math.inf and not (causal and r * span > last)]
        best = sorted(usable, key=lambda r: (-row[r], r))[:k]
        indices[tuple(at)][: len(best)] = torch.tensor(best, dtype=torch.int64)
    mask = masks.top_k_keys(scores, k=k, k_len=k_len, block=block, span=span, causal=causal)
    assert_keeps(mask, live_of_indices(indices, k_len, span, causal), block)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("span", [8, 32])  # 32: all at once in another way
@pytest.mark.parametrize("at_once", [1, 100, 1000])
def test_borders_of_chunks_leave_no_trace(monkeypatch, at_once, span, causal):
    scores = coarse((2, 2, 70, -(-200 // span)), seed=5)

    def build():
        return masks.top_k_keys(scores, k=4, k_len=200, block=(16, 64), span=span, causal=causal)

    whole = build()
    monkeypatch.setattr(chosen_keys, "_AT_ONCE", at_once)
    assert build() == whole


@given(key_choices(), st.integers(1, 3), SEEDS)
def test_a_row_of_tiles_keeps_the_tiles_that_are_named_most(drawn, most, seed):
    shape, k_len, block, _, causal = drawn
    indices = torch.randint(-1, k_len, (*shape, 3), generator=generator(seed)).sort(-1).values
    indices[..., 1:][indices[..., 1:] == indices[..., :-1]] = -1  # each key once
    live = live_of_indices(indices, k_len, 1, causal)
    q_len = live.shape[-2]
    rows, cols = blocks_of(q_len, k_len, block)
    named = torch.zeros(*live.shape[:2], rows * block[0], cols * block[1])
    named[..., :q_len, :k_len] = live
    named = named.unflatten(2, (rows, block[0])).unflatten(4, (cols, block[1])).sum((3, 5))
    layout = torch.zeros(named.shape, dtype=torch.bool)
    for at in torch.cartesian_prod(*map(torch.arange, named.shape[:3])).tolist():
        row = named[tuple(at)].tolist()
        layout[tuple(at)][sorted(range(cols), key=lambda j: (-row[j], j))[:most]] = True
    mask = masks.selected_keys(indices, k_len=k_len, block=block, causal=causal, most=most)
    assert_keeps(mask, live & tokens_of(layout, q_len, k_len, block), block)
    assert len(mask.indices) <= live.shape[0] * live.shape[1] * rows * min(most, cols)


@pytest.mark.parametrize("way", ["operations", "kernels"])
def test_where_neighbours_agree_tiles_are_full(way):
    with by(way):
        indices = torch.tensor([0, 3]).expand(64, 2)
        mask = masks.selected_keys(indices, k_len=128, block=32, span=32)
        stored = int(mask.indptr[-1])
        assert stored == 4 and (mask.tile[:stored] == 0).all()


# ---------------------------------------------------------------------- pooled scores


@given(sizes(), st.sampled_from([(4, 4), (4, 2), (3, 1)]), SEEDS)
def test_pooled_scores_are_the_mean_scores_of_the_tiles(drawn, heads, seed):
    q_len, k_len, block = drawn
    q = torch.randn(2, heads[0], q_len, 8, generator=generator(seed))
    k = torch.randn(2, heads[1], k_len, 8, generator=generator(seed + 1))
    raw = q.double() @ k.double().repeat_interleave(heads[0] // heads[1], 1).mT * 8**-0.5
    got = masks.pooled_scores(q, k, block=block)
    assert got.dtype == torch.float32 and got.shape == (2, heads[0], *blocks_of(q_len, k_len, block))
    for i in range(got.shape[2]):
        for j in range(got.shape[3]):
            tile = raw[..., i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            torch.testing.assert_close(got[..., i, j].double(), tile.mean((-2, -1)), rtol=1e-4, atol=1e-6)


@given(sizes(), st.integers(0, MOST), SEEDS)
def test_pooled_scores_with_lengths_are_those_of_the_shorter_sequence(drawn, length, seed):
    q_len, _, block = drawn
    q, k = torch.randn(2, 1, 2, q_len, 8, generator=generator(seed))
    got = masks.pooled_scores(q, k, block=block, lengths=torch.tensor([length]))
    length = min(length, q_len)
    rows, cols = blocks_of(length, length, block)
    assert (got[..., cols:] == -torch.inf).all() and got[..., :cols].isfinite().all()
    if length:
        short = masks.pooled_scores(q[:, :, :length], k[:, :, :length], block=block)
        torch.testing.assert_close(got[..., :rows, :cols], short, rtol=1e-4, atol=1e-6)


def test_what_lies_past_a_length_does_not_reach_pooled_scores():
    q, k = torch.randn(2, 1, 1, 64, 8, generator=generator(0))
    scores = masks.pooled_scores(q, k, block=16, lengths=torch.tensor([20]))
    q[:, :, 20:], k[:, :, 20:] = torch.nan, torch.inf
    assert torch.equal(masks.pooled_scores(q, k, block=16, lengths=torch.tensor([20])), scores)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_pooled_scores_are_summed_in_single_precision_under_autocast_too(dtype):
    q, k = torch.randn(2, 1, 2, 100, 16, generator=generator(0)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        got = masks.pooled_scores(q, k, block=32, scale=1.0)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(got, masks.pooled_scores(q.double(), k.double(), block=32, scale=1.0).to(got.dtype))


# ---------------------------------------------------------------------- antidiagonal scores


def antidiagonal_formula(q, k, block, stride, causal):
    """The docstring's formula for one head, a group and a token at a time: q `[Nq, D]`, k `[Nk, D]`, in fp64."""
    (q_len, dim), k_len = q.shape, k.shape[0]
    groups_q, groups_k = -(-q_len // stride), -(-k_len // stride)
    s = torch.full((groups_q, groups_k), -torch.inf, dtype=torch.float64)
    for a, c in itertools.product(range(groups_q), range(groups_k)):
        last = min(a * stride + stride, q_len) - 1 + k_len - q_len
        if not causal or c * stride <= last:
            tokens = [(a * stride + stride - 1 - t, c * stride + t) for t in range(stride)]
            pairs = [(x, y) for x, y in tokens if x < q_len and y < k_len]
            s[a, c] = sum((q[x] @ k[y] for x, y in pairs), torch.tensor(0.0).double()) / (stride * dim**0.5)
    p = s.softmax(1).nan_to_num(0.0)
    found = torch.zeros(blocks_of(q_len, k_len, block), dtype=torch.float64)
    for i, j in itertools.product(*map(range, found.shape)):
        rows, cols = (slice(n * b // stride, (n + 1) * b // stride) for n, b in zip((i, j), block))
        found[i, j] = p[rows, cols].sum(1).mean()
    return found.log()


@given(sizes(), st.sampled_from([4, 8, 16]), st.booleans(), SEEDS, st.sampled_from([1, 1 << 24]))
def test_antidiagonal_scores_follow_their_formula(drawn, stride, causal, seed, at_once):
    q_len, k_len, block = drawn
    q = 3 * torch.randn(2, 2, q_len, 4, generator=generator(seed))
    k = torch.randn(2, 1, k_len, 4, generator=generator(seed + 1))
    with mock.patch.object(antidiagonal, "_AT_ONCE", at_once):
        got = masks.antidiagonal_scores(q, k, block=block, stride=stride, causal=causal)
    assert got.dtype == torch.float32 and got.shape == (2, 2, *blocks_of(q_len, k_len, block))
    for b, h in itertools.product(range(2), range(2)):
        want = antidiagonal_formula(q[b, h].double(), k[b, 0].double(), block, stride, causal)
        torch.testing.assert_close(got[b, h].double(), want, rtol=1e-4, atol=1e-4)


@given(sizes(), st.integers(0, MOST), st.booleans(), SEEDS)
def test_antidiagonal_scores_with_lengths_are_those_of_the_shorter_sequence(drawn, length, causal, seed):
    q_len, _, block = drawn
    q, k = torch.randn(2, 1, 2, q_len, 8, generator=generator(seed))
    length = min(length, q_len)
    q[:, :, length:], k[:, :, length:] = torch.nan, torch.inf
    given_arguments = {"block": block, "stride": 8, "causal": causal}
    got = masks.antidiagonal_scores(q, k, lengths=torch.tensor([length]), **given_arguments)
    rows, cols = blocks_of(length, length, block)
    assert (got[..., cols:] == -torch.inf).all() and (got[..., rows:, :] == -torch.inf).all()
    if length:
        short = masks.antidiagonal_scores(q[:, :, :length], k[:, :, :length], **given_arguments)
        torch.testing.assert_close(got[..., :rows, :cols], short, rtol=1e-4, atol=1e-5)


@given(INTEGERS, st.lists(st.integers(0, 127), min_size=2, max_size=2), st.booleans())
@example(torch.int8, [100, 127], True)
@example(torch.uint8, [100, 0], False)
def test_lengths_of_every_integer_type_serve_scores_of_more_tokens_than_it_counts(dtype, lengths, causal):
    q, k = torch.randn(2, 2, 1, 300, 8, generator=generator(0))
    lengths = torch.tensor(lengths)
    for scores in (masks.pooled_scores, functools.partial(masks.antidiagonal_scores, causal=causal)):
        got = scores(q, k, block=32, lengths=lengths.to(dtype))
        assert torch.equal(got, scores(q, k, block=32, lengths=lengths))
        assert torch.equal(got, scores(q, k, block=32, lengths=lengths.tolist()))
        with pytest.raises(TypeError, match=r"lengths must be an integer tensor; got torch\.float32"):
            scores(q, k, block=32, lengths=lengths.float())


def test_antidiagonals_cross_slashes_of_odd_distance_only():
    k = torch.eye(128)[None, None]
    odd, even = (
        masks.antidiagonal_scores(64 * k.roll(distance, 2), k, block=32, stride=8)[0, 0] for distance in (41, 40)
    )
    assert odd[3].argmax() == 2  # queries 96..127 look at keys 55..86
    torch.testing.assert_close(even, torch.full((4, 4), 0.25).log())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_antidiagonal_scores_are_of_at_least_single_precision_and_carry_no_gradient(dtype):
    q, k = torch.randn(2, 1, 2, 100, 16, generator=generator(0)).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = masks.antidiagonal_scores(q, k, block=32, causal=True)
    assert got.dtype == torch.promote_types(dtype, torch.float32) and not got.requires_grad
    want = masks.antidiagonal_scores(q.double(), k.double(), block=32, causal=True)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=8 * torch.finfo(dtype).eps)


# ---------------------------------------------------------------------- in use


BUILD = {
    "top-k": lambda s, **a: masks.top_k_blocks(s, k=2, **a),
    "mass": lambda s, **a: masks.mass_blocks(s, mass=0.6, **a),
}


N = 50


def padded_problem(seed=0):
    """A length that is no multiple of the block, grouped heads, tensors that want gradients."""
    shapes = [(1, 4, N, 16), (1, 2, N, 16), (1, 2, N, 16)]
    return [torch.randn(s, generator=generator(3 * seed + i)).requires_grad_() for i, s in enumerate(shapes)]


def build(name, q, k):
    """A causal mask of this kind from q and k, for all their heads."""
    if name in BUILD:
        scores = masks.pooled_scores(q, k, block=16)
        return BUILD[name](scores, q_len=N, block=16, causal=True, local_blocks=1)
    chunks = k.unflatten(2, (-1, 2)).mean(3)  # runs of two keys
    scores = q.unflatten(1, (2, 2)).mean(2) @ chunks.mT  # one choice a key head
    if name == "keys":
        return masks.top_k_keys(scores, k=3, k_len=N, block=16, span=2, causal=True, group=2)
    return masks.selected_keys(scores.topk(3).indices, k_len=N, block=16, span=2, causal=True, most=3, group=2)


ALL = ["top-k", "mass", "keys", "indices"]


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
@pytest.mark.parametrize("name", ALL)
def test_attention_over_what_was_chosen_is_that_of_the_reference(name, backend):
    q, k, v = padded_problem()
    results = []
    for use in (backend, "reference"):
        mask = build(name, q, k)
        assert mask.shape == (1, 4, N, N)
        out, lse = attention(q, k, v, mask, return_lse=True, backend=use)
        live = lse.isfinite()
        results.append([out, lse, *torch.autograd.grad(out.square().sum() + lse[live].sum(), (q, k, v))])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_the_choice_passes_no_gradient_on(name):
    q, k, v = padded_problem()
    mask = build(name, q, k)
    assert not masks.pooled_scores(q, k, block=16).requires_grad
    assert not any(getattr(mask, array).requires_grad for array in ("indices", "bits", "tile", "indptr", "words"))
    # As if the mask had been there before.
    got = torch.autograd.grad(attention(q, k, v, mask).sum(), (q, k, v))
    want = torch.autograd.grad(attention(q, k, v, mask.canonical()).sum(), (q, k, v))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_the_same_scores_give_the_same_arrays(name):
    q, k, _ = padded_problem()
    first, second = build(name, q, k), build(name, q, k)
    for array in ("indptr", "indices", "tile", "bits", "pattern"):
        assert torch.equal(getattr(first, array), getattr(second, array))


@pytest.mark.parametrize("fullgraph", [True, False], ids=["fullgraph", "breaks allowed"])
@pytest.mark.parametrize("name", ALL)
def test_torch_compile_makes_one_graph_of_choice_and_attention(name, fullgraph):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def step(q, k, v):
        return attention(q, k, v, build(name, q, k)).sin()

    torch.compiler.reset()
    compiled = torch.compile(step, backend=count, fullgraph=fullgraph)
    for seed in (0, 1):  # another choice from other values
        q, k, v = padded_problem(seed)
        got, want = compiled(q, k, v), step(q, k, v)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        got, want = (torch.autograd.grad(out.sum(), (q, k, v)) for out in (got, want))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1


def test_torch_compile_serves_another_length():
    def step(q, k, v):
        scores = masks.pooled_scores(q, k, block=16)
        return attention(q, k, v, masks.top_k_blocks(scores, k=2, q_len=q.shape[2], block=16, causal=True))

    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for length in (64, 100, 70):
        q, k, v = torch.randn(3, 1, 2, length, 16, generator=generator(length))
        torch.testing.assert_close(compiled(q, k, v), step(q, k, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_building_and_planning_wait_for_nothing(name):
    q, k, _ = padded_problem()
    build(name, q, k)  # what depends on lengths only is made now
    with NoWaiting():
        mask = build(name, q, k).with_lengths(torch.full((1,), 40))
        plan = plan_of(Problem.of(mask, scale=1.0), (1, 4), 2, (N, N))
        plan.worklist(0, 16), plan.worklist(1, 16)


@pytest.mark.parametrize(
    ("most", "make"),
    [
        (4, lambda x: masks.pooled_scores(x, x, block=16)),
        (25, lambda x: masks.top_k_blocks(x[0, :, :4, :4], k=2, q_len=64, block=16, causal=True, local_blocks=1)),
        (37, lambda x: masks.mass_blocks(x[0, :, :4, :4], mass=0.9, q_len=64, block=16, causal=True, local_blocks=1)),
        (74, lambda x: masks.selected_keys(x[..., :3].long(), k_len=64, block=16, causal=True)),
    ],
    ids=["pooled scores", "top-k", "mass", "selected keys"],
)
def test_few_operations_are_started(most, make):
    x = torch.randn(1, 3, 64, 16)
    make(x)
    with NoWaiting() as seen:
        make(x)
    assert seen.started <= most, "each takes the host about 5 us, which is what a choice costs on a GPU"


@pytest.mark.parametrize("name", ALL)
def test_sizes_are_known_without_any_value(name):
    q, k, _ = padded_problem()
    with mock.patch.object(masks, "pooled_scores", lambda q, k, block: torch.empty(1, 4, 4, 4, device=q.device)):
        mask = build(name, q.to("meta"), k.to("meta"))  # tensors of this device have no values to ask for
    assert mask.device.type == "meta"
    for array in ("indptr", "indices", "tile", "bits", "pattern"):
        assert getattr(mask, array).shape == getattr(build(name, q, k), array).shape


def test_heads_of_a_group_share_a_pattern():
    scores = distinct((2, 3, 4, 4), seed=0)
    mask = masks.top_k_blocks(scores, k=2, q_len=64, block=16, group=2)
    assert mask.pattern.tolist() == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5]]
    assert torch.equal(mask.to_dense()[:, ::2], masks.top_k_blocks(scores, k=2, q_len=64, block=16).to_dense())
    assert masks.top_k_blocks(scores[0, 0], k=2, q_len=64, block=16, group=8).pattern.tolist() == [[0] * 8]


def test_scores_of_half_precision_choose_as_they_are():
    scores = distinct((6, 6), seed=3).bfloat16()
    assert masks.top_k_blocks(scores, k=2, q_len=96, block=16) == masks.top_k_blocks(
        scores.double(), k=2, q_len=96, block=16
    )


# ---------------------------------------------------------------------- what is refused


SCORES = torch.zeros(4, 4)
INDICES = torch.zeros(64, 2, dtype=torch.int64)


@pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
@pytest.mark.parametrize(
    ("scores", "changes", "error", "message"),
    [
        ([[0.0]], {}, TypeError, r"scores must be a tensor; got list"),
        (SCORES.int(), {}, TypeError, r"scores must have a floating dtype; got torch\.int32"),
        (SCORES[0], {}, ValueError, r"scores must have shape \[Mq, Mk\], \[H, Mq, Mk\] or .*; got \[4\]"),
        (SCORES[:0], {}, ValueError, r"scores must have shape .*, none of them 0; got \[0, 4\]"),
        (SCORES[:3], {}, ValueError, r"scores must have 4 x 4 blocks of 16 x 16 .*; got 3 x 4"),
        (SCORES, {"k_len": 80}, ValueError, r"scores must have 4 x 5 blocks of 16 x 16 .*; got 4 x 4"),
        (SCORES, {"block": 17}, ValueError, r"block must be one of"),
        (SCORES, {"q_len": 0}, ValueError, r"q_len must be between 1"),
        (SCORES, {"sink_blocks": -1}, ValueError, r"sink_blocks must be at least 0 blocks; got -1"),
        (SCORES, {"local_blocks": 1.0}, TypeError, r"local_blocks must be an integer number of blocks; got 1\.0"),
        (SCORES, {"group": 0}, ValueError, r"group must be at least 1 query head; got 0"),
    ],
)
def test_choices_of_blocks_say_what_they_refuse(build, scores, changes, error, message):
    with pytest.raises(error, match=message):
        build(scores, **({"q_len": 64, "block": 16} | changes))


@pytest.mark.parametrize(("k", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (None, TypeError)])
def test_k_must_be_a_number_of_blocks(k, error):
    with pytest.raises(error, match=rf"k must be (at least 1 block|an integer number of blocks); got {k}"):
        masks.top_k_blocks(SCORES, k=k, q_len=64, block=16)


def test_k_must_hold_the_blocks_that_are_always_kept():
    message = r"must be at least the 3 blocks that sink_blocks and local_blocks keep in some row; got 2"
    always = {"q_len": 64, "block": 16, "causal": True, "sink_blocks": 1, "local_blocks": 2}
    with pytest.raises(ValueError, match=f"k {message}"):
        masks.top_k_blocks(SCORES, k=2, **always)
    with pytest.raises(ValueError, match=f"most {message}"):
        masks.mass_blocks(SCORES, mass=0.5, most=2, **always)
    masks.top_k_blocks(SCORES, k=3, **always).validate()


@pytest.mark.parametrize("mass", [0, -0.5, 1.01, math.nan])
def test_mass_must_be_a_share(mass):
    with pytest.raises(ValueError, match=rf"mass must be above 0 and at most 1; got {mass}"):
        masks.mass_blocks(SCORES, mass=mass, q_len=64, block=16)


@pytest.mark.parametrize("mass", ["0.5", None, True])
def test_mass_must_be_a_number(mass):
    with pytest.raises(TypeError, match="mass must be a number; got"):
        masks.mass_blocks(SCORES, mass=mass, q_len=64, block=16)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: masks.selected_keys(INDICES.float(), k_len=64), TypeError, r"indices must have an integer dtype"),
        (lambda: masks.selected_keys(INDICES > 0, k_len=64), TypeError, r"an integer dtype; got torch\.bool"),
        (lambda: masks.selected_keys(INDICES[0], k_len=64), ValueError, r"indices must have shape .*; got \[2\]"),
        (lambda: masks.selected_keys(INDICES, k_len=0), ValueError, r"k_len must be between 1"),
        (lambda: masks.selected_keys(INDICES, k_len=64, span=3), ValueError, r"span must be a power of two; got 3"),
        (lambda: masks.selected_keys(INDICES, k_len=64, span=0), ValueError, r"span must be at least 1 key; got 0"),
        (lambda: masks.selected_keys(INDICES, k_len=64, most=0), ValueError, r"most must be at least 1 tile; got 0"),
        (lambda: masks.selected_keys(INDICES, k_len=64, group=0), ValueError, r"group must be at least 1 query head"),
        (lambda: masks.top_k_keys(SCORES, k=0, k_len=4), ValueError, r"k must be at least 1 key; got 0"),
        (lambda: masks.top_k_keys(SCORES, k=1, k_len=5), ValueError, r"scores must have 5 columns for 5 keys .*got 4"),
        (lambda: masks.top_k_keys(SCORES.long(), k=1, k_len=4), TypeError, r"scores must have a floating dtype"),
        (lambda: masks.pooled_scores(SCORES, SCORES), ValueError, r"q must be a floating tensor .*; got .* \[4, 4\]"),
        (lambda: masks.pooled_scores(torch.zeros(1, 1, 2, 3), None), ValueError, r"k must be .*; got NoneType"),
        (lambda: masks.antidiagonal_scores(SCORES, SCORES), ValueError, r"q must be a floating tensor .* \[4, 4\]"),
        (
            lambda: masks.antidiagonal_scores(*torch.zeros(2, 1, 1, 8, 4), block=32, stride=12),
            ValueError,
            "stride must divide the block; got 12 and 32",
        ),
        (
            lambda: masks.antidiagonal_scores(*torch.zeros(2, 1, 1, 8, 4), stride=0),
            ValueError,
            "stride must be at least 1 token; got 0",
        ),
        (
            lambda: masks.antidiagonal_scores(*torch.zeros(2, 1, 1, 8, 4), causal="yes"),
            TypeError,
            "causal must be True or False; got 'yes'",
        ),
        (
            lambda: masks.pooled_scores(torch.zeros(1, 3, 8, 4), torch.zeros(1, 2, 8, 4)),
            ValueError,
            r"q and k must have one batch size.*; got \[1, 3, 8, 4\] and \[1, 2, 8, 4\]",
        ),
        (
            lambda: masks.pooled_scores(*torch.zeros(2, 1, 3, 8, 4), lengths=torch.tensor([1, 2])),
            ValueError,
            r"lengths must have shape \[1\]; got \[2\]",
        ),
    ],
)  # fmt: skip
def test_the_others_say_what_they_refuse(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---------------------------------------------------------------------- on a GPU


def gpu_tensors(tokens=16_384, heads=8):
    g = torch.Generator("cuda").manual_seed(0)
    shape = (1, heads, tokens, 128)
    return [torch.randn(shape, generator=g, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]


def gpu_masks(q, k):
    """What is timed: each from what a step has at hand, at 16,384 tokens in blocks of 128."""
    scores = masks.pooled_scores(q, k)
    indices = torch.randint(0, 16_384 // 64, (1, 1, 16_384, 16), device="cuda")
    sizes = {"q_len": 16_384, "causal": True}
    return {
        "pooled scores": lambda: masks.pooled_scores(q, k),
        "top-k blocks": lambda: masks.top_k_blocks(scores, k=16, sink_blocks=1, local_blocks=2, **sizes),
        "mass of blocks": lambda: masks.mass_blocks(scores, mass=0.9, sink_blocks=1, local_blocks=2, **sizes),
        "selected keys": lambda: masks.selected_keys(indices, k_len=16_384, span=64, causal=True, group=8),
    }


@pytest.mark.gpu
def test_a_new_choice_at_every_step_waits_for_nothing():
    q, k, v = gpu_tensors(4096)

    def step():
        mask = masks.top_k_blocks(masks.pooled_scores(q, k), k=8, q_len=4096, causal=True, local_blocks=1)
        attention(q, k, v, mask).sum().backward()
        mask = masks.mass_blocks(masks.pooled_scores(q, k), mass=0.5, q_len=4096, most=12, causal=True)
        attention(q, k, v, mask).sum().backward()
        indices = torch.randint(0, 64, (1, 8, 4096, 4), device="cuda")
        attention(q, k, v, masks.selected_keys(indices, k_len=4096, span=64, causal=True)).sum().backward()

    step()  # compiles
    with waiting_raises():
        step()


@pytest.mark.gpu
def test_the_gpu_chooses_what_the_cpu_chooses():
    scores = coarse((2, 4, 40, 40), seed=0)
    for build in BUILD.values():
        arguments = {"q_len": 1270, "block": 32, "causal": True}
        assert build(scores.cuda(), **arguments) == build(scores, **arguments)
    indices = torch.randint(-1, 160, (2, 2, 1270, 7), generator=generator(0))
    on_gpu, on_cpu = (masks.selected_keys(i, k_len=1270, block=32, span=8, most=20) for i in (indices.cuda(), indices))
    assert on_gpu == on_cpu


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pooled scores", "top-k blocks", "mass of blocks", "selected keys"])
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="times the GPU: run it alone, without -n")
def test_a_mask_for_16384_tokens_takes_under_a_millisecond(name):
    q, k, _ = gpu_tensors()
    make = gpu_masks(q, k)[name]
    make()
    times = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(20):  # as a model's layers do, one after the other
            make()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 20)
    print(f"{name}: {sorted(times)[2]:.3f} ms a mask, of {len(times)} series {min(times):.3f} to {max(times):.3f}")
    assert sorted(times)[2] < 1.0, f"milliseconds a mask: {sorted(times)}"

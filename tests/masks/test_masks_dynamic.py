import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import masks
from sparseflash.masks import fused
from tests.drawn.masks import SEEDS
from tests.masks.chosen_blocks import (
    SCORES,
    WAYS,
    as_four,
    assert_keeps,
    blocks_of,
    by,
    causal_tokens,
    coarse,
    distinct,
    generator,
    sizes,
    tiles_with,
    tokens_of,
)


def forced_tiles(q_len, k_len, block, causal, sink, local):
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
    q_len, k_len, block = draw(sizes())
    causal = draw(st.booleans())
    sink, local = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 1), (1, 2), (2, 1)]))
    shape = draw(st.sampled_from([(), (3,), (2, 2), (1, 3)])) + blocks_of(q_len, k_len, block)
    live = causal_tokens(q_len, k_len) if causal else torch.ones(q_len, k_len, dtype=torch.bool)
    arguments = {
        "q_len": q_len, "k_len": k_len, "block": block, "causal": causal, "sink_blocks": sink, "local_blocks": local,
    }  # fmt: skip
    return shape, arguments, live, forced_tiles(q_len, k_len, block, causal, sink, local)


def rows_of(scores, arguments, live, forced):
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
    k = max(1, int(forced.sum(1).max())) + extra
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
                return
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
        always = {"q_len": 16, "k_len": 64, "block": 16, "local_blocks": 1}
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
    for shift in (-1e4, 300.0):
        shifted = scores.double() + shift
        mask = masks.mass_blocks(shifted, mass=0.7, q_len=96, block=16)
        assert mask == masks.mass_blocks(scores.double(), mass=0.7, q_len=96, block=16)


@given(choices(), st.sampled_from([0.2, 0.7, 1.0, None]), st.booleans(), SEEDS)
def test_kernels_choose_what_operations_choose(drawn, mass, half, seed):
    shape, arguments, _, forced = drawn
    scores = coarse(shape, seed)  # few values, so that no sum of shares falls near the mass by chance
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
    assert not fused.serves(SCORES, 4, 4)

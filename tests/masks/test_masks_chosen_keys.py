import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import masks
from sparseflash.masks import chosen_keys
from tests.drawn.masks import SEEDS
from tests.masks.chosen_blocks import (
    INTEGERS,
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
    tokens_of,
)


@st.composite
def key_choices(draw):
    q_len, k_len, block = draw(sizes())
    leading = draw(st.sampled_from([(), (2,), (2, 2)]))
    return (*leading, q_len), k_len, block, draw(st.sampled_from([1, 1, 2, 8, 16, 32, 64, 128])), draw(st.booleans())


def live_of_indices(indices, k_len, span, causal):
    runs = torch.arange(k_len) // span
    live = (indices.unsqueeze(-1) == runs).any(-2)
    return as_four(live & causal_tokens(live.shape[-2], k_len) if causal else live)


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
@pytest.mark.parametrize("span", [8, 32])
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
    indices[..., 1:][indices[..., 1:] == indices[..., :-1]] = -1
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

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash.blockmask import bitmask
from tests.drawn.masks import SEEDS, blocks

ALL_BLOCKS = (16, 32, 64, 128, 256)


def drawn_tiles(count, block, seed, share=0.5):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.random((count, *block)) < share)


@given(blocks(ALL_BLOCKS), st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.5, 1.0]), SEEDS)
def test_unpacking_gives_back_what_was_packed(block, count, share, seed):
    live = drawn_tiles(count, block, seed, share)
    words = bitmask.pack(live)
    assert words.dtype == torch.int32
    assert words.shape == (count, block[0], bitmask.words_per_row(block[1]))
    assert torch.equal(bitmask.unpack(words, block[1]), live)


@given(st.sampled_from(ALL_BLOCKS[1:]), SEEDS)
def test_packing_gives_back_any_words_that_were_unpacked(block_k, seed):
    rng = np.random.default_rng(seed)
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, (2, 3, 16, block_k // 32), dtype=np.int32))
    assert torch.equal(bitmask.pack(bitmask.unpack(words, block_k)), words)


@pytest.mark.parametrize("block_k", ALL_BLOCKS)
def test_views_of_any_strides_and_offset_are_packed(block_k):
    live = drawn_tiles(3, (17, 2 * block_k + 1), seed=0)
    expanded = live[:, :, :1].expand(-1, -1, block_k)
    transposed = drawn_tiles(3, (block_k, 17), seed=1).transpose(1, 2)
    for view in (live[:, 1:, 1 : block_k + 1], live[:, :, :-1:2], expanded, transposed, live[0, 0, 3 : block_k + 3]):
        assert torch.equal(bitmask.unpack(bitmask.pack(view), block_k), view)


@given(blocks(ALL_BLOCKS), st.data())
def test_a_score_is_bit_k_mod_32_of_word_k_div_32_of_its_row(block, data):
    q, k = data.draw(st.integers(0, block[0] - 1)), data.draw(st.integers(0, block[1] - 1))
    live = torch.zeros(block, dtype=torch.bool)
    live[q, k] = True
    words = bitmask.pack(live)
    assert words.nonzero().tolist() == [[q, k // 32]]
    assert int(words[q, k // 32]) % 2**32 == 1 << (k % 32)


@pytest.mark.parametrize("block_k", ALL_BLOCKS)
def test_the_full_word_is_a_packed_row_of_live_scores(block_k):
    words = bitmask.pack(torch.ones(16, block_k, dtype=torch.bool))
    assert (words == bitmask.full_word(block_k)).all()


@given(blocks(ALL_BLOCKS), st.integers(0, 4), st.sampled_from([0.0, 0.1, 0.5, 0.99, 1.0]), SEEDS)
def test_live_scores_are_counted(block, count, share, seed):
    live = drawn_tiles(count, block, seed, share)
    assert bitmask.live_scores(bitmask.pack(live)).tolist() == live.sum((-2, -1)).tolist()


# ---------------------------------------------------------------------- deduplicate


def distinct_in_order(items):
    return list(dict.fromkeys(items))


def as_keys(words):
    return [tile.numpy().tobytes() for tile in words]


@pytest.fixture
def slow_roads(monkeypatch):
    taken, unique = [], torch.unique

    def spy(values, *arguments, **options):
        if options.get("dim") is not None:
            taken.append(len(values))
        return unique(values, *arguments, **options)

    monkeypatch.setattr(torch, "unique", spy)
    return taken


def assert_deduplicated(words, unique, inverse):
    assert torch.equal(unique[inverse], words)
    assert as_keys(unique) == distinct_in_order(as_keys(words))


ROADS = pytest.mark.parametrize("few", [bitmask.FEW, 0])


@ROADS
@given(blocks(ALL_BLOCKS), st.lists(st.integers(0, 4), max_size=12), SEEDS)
def test_distinct_tiles_come_in_order_of_first_appearance(few, block, choice, seed):
    words = bitmask.pack(drawn_tiles(5, block, seed))[choice]
    with mock.patch.object(bitmask, "FEW", few):
        assert_deduplicated(words, *bitmask.deduplicate(words))


@ROADS
@given(blocks(ALL_BLOCKS), st.lists(st.integers(0, 5), max_size=12), st.sampled_from([1, 1 << 12, 1 << 22]), SEEDS)
def test_tiles_are_dead_full_or_partial(few, block, choice, at_once, seed):
    live = drawn_tiles(6, block, seed)
    live[0], live[1] = False, True
    words = bitmask.pack(live)[choice]
    with mock.patch.multiple(bitmask, FEW=few, WORDS_AT_ONCE=at_once):
        kind, distinct = bitmask.classify(lambda some: words[some], torch.arange(len(words)), *block)
    assert kind.dtype == torch.int64 and distinct.dtype == torch.int32
    assert (kind == -1).tolist() == [number == 0 for number in choice]
    assert (kind == 0).tolist() == [number == 1 for number in choice]
    assert torch.equal(distinct[kind[kind > 0] - 1], words[kind > 0])
    assert as_keys(distinct) == distinct_in_order(as_keys(words[kind > 0]))


def test_tiles_that_differ_in_one_score_are_distinct(slow_roads):
    live = torch.zeros(1 + 16 * 32, 16, 32, dtype=torch.bool)
    live[torch.arange(16 * 32) + 1, torch.arange(16 * 32) // 32, torch.arange(16 * 32) % 32] = True
    words = bitmask.pack(live)
    unique, inverse = bitmask.deduplicate(words)
    assert len(unique) == len(words)
    assert_deduplicated(words, unique, inverse)
    assert slow_roads == []


def test_colliding_fingerprints_take_the_slow_road_and_lose_no_tile(monkeypatch, slow_roads):
    monkeypatch.setattr(bitmask, "FEW", 0)
    # The fingerprint is the sum of a tile's words, so exchanging two words collides.
    monkeypatch.setattr(torch, "randint", lambda low, high, size, **options: torch.ones(size, dtype=torch.int64))
    words = bitmask.pack(drawn_tiles(1, (16, 64), seed=3)).repeat(4, 1, 1)
    words[1] = words[0].flip(0)
    words[3] = words[0].flip(1)
    assert not torch.equal(words[0], words[1])
    unique, inverse = bitmask.deduplicate(words)
    assert slow_roads == [4]
    assert inverse.tolist() == [0, 1, 0, 2]
    assert_deduplicated(words, unique, inverse)


# ---------------------------------------------------------------------- the rest


@given(blocks(ALL_BLOCKS), st.lists(st.integers(-300, 600), max_size=9))
def test_words_below_a_key_are_those_of_the_keys_before_it(block, stops):
    words = torch.from_numpy(bitmask.below(np.array(stops, dtype=np.int64), block[1]))
    expected = torch.arange(block[1]) < torch.tensor(stops, dtype=torch.int64)[:, None]
    assert torch.equal(bitmask.unpack(words, block[1]), expected.view(-1, block[1]))


@given(blocks(ALL_BLOCKS), st.data())
def test_a_rectangle_is_live_in_its_first_rows_and_columns(block, data):
    live_q, live_k = data.draw(st.integers(0, block[0])), data.draw(st.integers(0, block[1]))
    words = bitmask.rectangle(*block, live_q, live_k, torch.device("cpu"))
    expected = (torch.arange(block[0]) < live_q)[:, None] & (torch.arange(block[1]) < live_k)
    assert torch.equal(bitmask.unpack(words, block[1]), expected)

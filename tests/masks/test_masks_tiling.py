from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.masks.tiling import listing
from sparseflash.masks.tiling.diagonals import diagonals
from sparseflash.masks.tiling.kinds import by_kind
from sparseflash.masks.tiling.spans import spans, spans_of_heads
from tests.compared.portions import assert_same_in_portions
from tests.drawn.masks import SEEDS, blocks, lengths
from tests.masks.mask_rules import BLOCKS, assert_keeps, grid
from tests.masks.sequence_sizes import MOST, sizes, square


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


@given(lengths(MOST), lengths(MOST), blocks(BLOCKS), SEEDS)
def test_spans_keeps_two_runs_of_each_query(q_len, k_len, block, seed):
    rng = np.random.default_rng(seed)
    ends = []
    for most in rng.choice([1, 20, k_len + 5], 2):
        at = rng.integers(-5, k_len + 5, q_len) if rng.random() < 0.5 else np.arange(q_len) + rng.integers(-20, k_len)
        ends += [torch.from_numpy(at), torch.from_numpy(at + rng.integers(-3, most + 1))]
    q, k = grid(q_len, k_len)
    first, second = ((start[q] <= k) & (k < stop[q]) for start, stop in (ends[:2], ends[2:]))
    made = spans_of_heads(*ends[:2], k_len, [(None, None)], [0], second=(ends[2], ends[3]), block=block)
    assert_keeps(made, first | second)


@pytest.mark.parametrize("long", [0, 256])
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 9)), min_size=1, max_size=9))
def test_ranges_are_copied_or_looked_up(long, ends):
    first, last = np.array(ends).T
    table = np.arange(100, 110, dtype=np.int32)
    each = [list(range(a, b + 1)) for a, b in ends]
    out = np.empty(sum(map(len, each)), dtype=np.int32)
    with mock.patch.object(listing, "_LONG", long):
        listing.take_ranges(table, first, last, out)
        indptr, cols = listing.rows_of(first, last)
    assert cols.tolist() == [col for some in each for col in some] == (out - 100).tolist()
    assert indptr.tolist() == [0, *np.cumsum([len(some) for some in each])]


@given(sizes(), SEEDS)
def test_diagonals_keeps_a_set_of_distances(size, seed):
    q_len, block = size
    rng = np.random.default_rng(seed)
    there = torch.from_numpy(rng.random(2 * q_len + 21) < rng.choice([0.01, 0.1, 0.9]))
    offsets = there.nonzero()[:, 0] - (q_len + 10)
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


@pytest.mark.parametrize(
    ("module", "name", "make"),
    [
        ("tiling.kinds", "SCORES_AT_ONCE", lambda: masks.neighborhood((9, 11), window=5, block=16)),
        ("tiling.ranges", "_BOXES_AT_ONCE", lambda: masks.neighborhood((9, 11), window=3, dilation=2, block=16)),
        ("tiling.spans", "WORDS_AT_ONCE", lambda: masks.documents([5, 40, 17, 60, 33], causal=True, block=16)),
        (
            "vertical_slash",
            "WORDS_AT_ONCE",
            lambda: masks.vertical_slash(150, vertical=[3, 40, 99], slash=[0, 7, 50], block=16),
        ),
    ],
    ids=["kinds", "ranges", "spans", "vertical_slash"],
)
def test_a_mask_is_the_same_made_in_portions(module, name, make):
    assert_same_in_portions(make, f"sparseflash.masks.{module}", name)


@pytest.mark.parametrize("collide", [False, True])
@given(data=st.data())
def test_blocks_that_share_a_label_are_found_whatever_the_digests(collide, data):
    count = data.draw(st.integers(1, 12))
    of_queries, of_keys = (
        listing.incidence(torch.tensor(data.draw(st.lists(row, min_size=1, max_size=6))), count)
        for row in 2 * [st.lists(st.integers(0, count - 1), min_size=3, max_size=3)]
    )
    digests = (lambda blocks, starts, counts: counts % 2) if collide else listing._digests
    with mock.patch.object(listing, "_digests", digests):
        found = listing.sharing(of_queries, of_keys)
    wanted = listing.entries(of_queries @ of_keys.T)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))

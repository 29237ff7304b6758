from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.blockmask import patterns


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 7), st.booleans())
def test_kinds_are_found_in_the_order_of_first_appearance(kinds, at_once, few):
    listed = np.array(kinds, dtype=np.int32)
    with mock.patch.multiple(patterns, TILES_AT_ONCE=at_once, FEW_NUMBERS=512 if few else 0):
        assert patterns.kinds_by_appearance(listed, 6).tolist() == list(dict.fromkeys(kinds))
        first = patterns.first_of_each(listed, 6).tolist()
    assert first == [kinds.index(kind) if kind in kinds else len(kinds) for kind in range(6)]


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=6), min_size=1, max_size=6), st.integers(1, 7))
def test_patterns_are_equal_however_far_they_begin_alike(kinds, at_once):
    table = np.array([0, 1, 2, 2], dtype=np.int32)
    listed = [
        patterns.Pattern(np.array([len(some)]), np.arange(len(some), dtype=np.int32), np.array(some, np.int32), table)
        for some in kinds
    ]
    with mock.patch.object(patterns, "TILES_AT_ONCE", at_once):
        keep, number = patterns.distinct_patterns(listed)
        indptr, cols, tile = patterns.joined([listed[p] for p in keep])
    renamed = [tuple(table[some]) for some in kinds]
    order = list(dict.fromkeys(renamed))
    assert [renamed[p] for p in keep] == order
    assert number == [order.index(one) for one in renamed]
    assert tile.tolist() == [kind for one in order for kind in one]
    assert indptr.tolist() == [0, *np.cumsum([len(one) for one in order])]
    assert cols.tolist() == [col for one in order for col in range(len(one))]


@pytest.mark.parametrize(
    ("of_heads", "of_one"),
    [
        (
            lambda n: masks.fixed(n, stride=20, summary=4, heads=5, num_verts=3, block=16),
            lambda n, v: BlockMask.from_function(
                lambda q, k: (k <= q) & ((q // 20 == k // 20) | ((k % 20 >= 16 - 4 * v) & (k % 20 < 20 - 4 * v))),
                n,
                block=16,
            ),
        ),
        (
            lambda n: masks.deepspeed_fixed(n, heads=5, global_patterns=3, causal=True, block=16),
            lambda n, v: BlockMask.from_function(
                lambda q, k: (k <= q) & ((q // 64 == k // 64) | (k // 16 % 4 == 3 - v)), n, block=16
            ),
        ),
    ],
)
def test_heads_made_at_once_are_stacked_heads(of_heads, of_one):
    # In 64 tokens there is one chunk, and all heads of deepspeed_fixed see the same.
    for n in (64, 320, 511):
        one = [of_one(n, v) if n % 64 == 0 else None for v in range(3)]
        mask = of_heads(n).validate()
        if one[0] is not None:
            assert mask == masks.per_head([one[h % 3] for h in range(5)])
        assert mask == masks.per_head([mask.select(heads=h) for h in range(5)])


def test_a_stack_lists_the_tiles_of_equal_masks_once():
    one, other = (masks.local(4096, window=window, block=16) for window in (300, 302))
    listed = []

    def joined(some):
        listed.append(sum(len(each.tile) for each in some))
        return patterns.joined(some)

    with mock.patch("sparseflash.blockmask.build.joined", side_effect=joined):
        found = masks.per_head([mask.crop() for mask in (one, other, one, other, one)])
    assert listed == [len(one.indices) + len(other.indices)]
    assert found.pattern.tolist() == [[0, 1, 0, 1, 0]] and found.select(heads=1) == other

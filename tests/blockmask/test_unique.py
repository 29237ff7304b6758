from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash.blockmask import unique

VALUES = st.one_of(
    *(
        st.lists(st.integers(-most, most) | st.sampled_from([-most, 0, most]), max_size=30)
        for most in (5, 1 << 20, (1 << 63) - 1)
    )
)


def int64(values):
    return torch.tensor(values, dtype=torch.int64)


@pytest.fixture
def sorts(monkeypatch):
    taken, sort = [], torch.Tensor.sort

    def spy(values, *arguments, **options):
        taken.append(len(values))
        return sort(values, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "sort", spy)
    return taken


@given(VALUES)
def test_distinct_is_unique(values):
    found, number = unique.distinct(int64(values))
    assert found.tolist() == sorted(set(values))
    assert torch.equal(found[number], int64(values))


@given(VALUES)
@example([1 << 40, 0, 1 << 40, -1])
def test_values_are_numbered_as_they_first_appear(values):
    number, first = unique.number_by_first_appearance(int64(values))
    order = list(dict.fromkeys(values))
    assert number.tolist() == [order.index(value) for value in values]
    assert first.tolist() == [values.index(value) for value in order]


@pytest.mark.parametrize(("apart", "sorted_at_all"), [(1, False), (1 << 20, True)])
def test_values_that_lie_close_together_are_not_sorted(sorts, apart, sorted_at_all):
    values = torch.arange(1000).flip(0) % 300 * apart
    found, number = unique.distinct(values)
    assert torch.equal(found[number], values)
    assert (sorts != []) == sorted_at_all


@given(st.integers(1, 4), st.integers(0, 20), st.data())
def test_combinations_have_one_number_iff_all_codes_are_equal(codes, count, data):
    near, far = st.integers(-3, 3), st.integers(-3, 3) | st.integers(-(2**30), 2**30)
    values = [data.draw(st.sampled_from([near, far])) for _ in range(codes)]
    drawn = [data.draw(st.lists(each, min_size=count, max_size=count)) for each in values]
    combinations = list(zip(*drawn))
    order = list(dict.fromkeys(combinations))
    for few in (unique.FEW_NUMBERS, 0):
        with mock.patch.object(unique, "FEW_NUMBERS", few):
            number, distinct = unique.number_combinations([int64(code) for code in drawn])
            by_appearance, first = unique.first_combinations([np.array(code, dtype=np.int64) for code in drawn])
        assert distinct == len(order) == len(set(number.tolist())) == len(set(zip(combinations, number.tolist())))
        assert number.tolist() == [] or (number.min(), number.max()) == (0, distinct - 1)
        assert by_appearance.tolist() == [order.index(one) for one in combinations]
        assert first.tolist() == [combinations.index(one) for one in order]

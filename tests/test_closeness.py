"""The measuring stick itself: it lets rounding pass and nothing else."""

import math

import pytest
import torch

from closeness import Results, assert_exact, error_in_yardsticks

TRUTH = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)


def test_an_exact_result_has_error_zero():
    assert error_in_yardsticks(TRUTH.float(), TRUTH.float(), TRUTH) == 0.0


def test_one_ulp_of_the_largest_value_is_allowed_even_if_the_plain_result_is_exact():
    eps = torch.finfo(torch.float32).eps
    got = TRUTH.float() + torch.tensor([0.0, 0.0, 4 * eps])
    assert error_in_yardsticks(got, TRUTH.float(), TRUTH) == pytest.approx(1.0)


def test_twice_the_plain_error_is_allowed_and_three_times_is_not():
    plain = (TRUTH + torch.tensor([0.0, 0.01, 0.0])).float()
    assert error_in_yardsticks((TRUTH + torch.tensor([0.019, 0.0, 0.0])).float(), plain, TRUTH) < 1.0
    assert error_in_yardsticks((TRUTH + torch.tensor([0.030, 0.0, 0.0])).float(), plain, TRUTH) > 1.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_nan_and_misplaced_infinities_are_never_close(wrong):
    got = TRUTH.float()
    got[1] = wrong
    assert error_in_yardsticks(got, TRUTH.float() + 1e6, TRUTH) == math.inf


def test_infinities_must_be_where_the_truth_has_them():
    truth = torch.tensor([-math.inf, 1.0], dtype=torch.float64)
    assert error_in_yardsticks(truth.float(), truth.float(), truth) == 0.0
    assert error_in_yardsticks(torch.tensor([0.0, 1.0]), truth.float(), truth) == math.inf
    assert error_in_yardsticks(torch.tensor([math.nan, 1.0]), truth.float(), truth) == math.inf


def test_zero_truth_allows_no_error():
    zeros = torch.zeros(3, dtype=torch.float64)
    assert error_in_yardsticks(torch.full((3,), 1e-30), zeros, zeros) == math.inf


def test_the_assertion_names_what_is_too_far():
    good = Results(*[TRUTH.float()] * 5)
    with pytest.raises(AssertionError, match="dk"):
        assert_exact(good._replace(dk=TRUTH.float() + 1), good, Results(*[TRUTH] * 5), {})

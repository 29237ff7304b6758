"""The measuring stick itself: it lets rounding pass and nothing else."""

import math

import pytest
import torch

from closeness import Results, assert_exact
from sparseflash.testing import error_in_yardsticks, largest_error

TRUTH = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
EPS = torch.finfo(torch.float32).eps


def off_by(*errors):
    return (TRUTH + torch.tensor(errors, dtype=torch.float64)).float()


def test_an_exact_result_has_error_zero():
    assert error_in_yardsticks(TRUTH.float(), TRUTH, 0.0) == 0.0


def test_one_ulp_of_the_largest_value_is_allowed_even_if_the_plain_result_is_exact():
    assert error_in_yardsticks(off_by(0.0, 0.0, 4 * EPS), TRUTH, 0.0) == pytest.approx(1.0)


def test_twice_the_plain_error_is_allowed_and_three_times_is_not():
    assert error_in_yardsticks(off_by(0.019, 0.0, 0.0), TRUTH, 0.01) < 1.0
    assert error_in_yardsticks(off_by(0.030, 0.0, 0.0), TRUTH, 0.01) > 1.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_nan_and_misplaced_infinities_are_never_close(wrong):
    got = TRUTH.float()
    got[1] = wrong
    assert largest_error(got, TRUTH) == math.inf
    assert error_in_yardsticks(got, TRUTH, 1e6) == math.inf


def test_infinities_must_be_where_the_truth_has_them():
    truth = torch.tensor([-math.inf, 1.0], dtype=torch.float64)
    assert error_in_yardsticks(truth.float(), truth, 0.0) == 0.0
    assert error_in_yardsticks(torch.tensor([0.0, 1.0]), truth, 1.0) == math.inf
    assert error_in_yardsticks(torch.tensor([math.nan, 1.0]), truth, 1.0) == math.inf
    assert error_in_yardsticks(torch.tensor([-math.inf, 1.5]), truth, 0.0) > 1.0


def test_zero_truth_allows_no_error():
    assert error_in_yardsticks(torch.full((3,), 1e-30), torch.zeros(3, dtype=torch.float64), 0.0) == math.inf


def test_the_assertion_names_what_is_too_far():
    good = Results(*[TRUTH.float()] * 5)
    assert_exact(good, Results(*[TRUTH] * 5), [0.0] * 5, {})
    with pytest.raises(AssertionError, match="dk"):
        assert_exact(good._replace(dk=TRUTH.float() + 1), Results(*[TRUTH] * 5), [0.0] * 5, {})


def test_a_small_sum_of_large_numbers_is_judged_by_their_size():
    got = off_by(0.0, 0.0, 8 * EPS)
    assert error_in_yardsticks(got, TRUTH, 0.0) > 1.0
    assert error_in_yardsticks(got, TRUTH, 0.0, magnitude=16.0) == pytest.approx(0.5)

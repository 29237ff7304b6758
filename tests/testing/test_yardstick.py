import math

import pytest
import torch

from sparseflash.backends import reference
from sparseflash.testing import Error, draws_for, error_of, largest_error, plain_dtype, plain_errors
from tests.compared.closeness import Results, assert_exact

TRUTH = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
EPS = torch.finfo(torch.float32).eps


def ratio_of(*arguments, **options):
    return error_of(*arguments, **options).ratio


def off_by(*errors):
    return (TRUTH + torch.tensor(errors, dtype=torch.float64)).float()


def test_an_exact_result_has_error_zero():
    assert ratio_of(TRUTH.float(), TRUTH, 0.0) == 0.0


def test_one_ulp_of_the_largest_value_is_allowed_even_if_the_plain_result_is_exact():
    assert ratio_of(off_by(0.0, 0.0, 4 * EPS), TRUTH, 0.0) == pytest.approx(1.0)


def test_twice_the_plain_error_is_allowed_and_three_times_is_not():
    assert ratio_of(off_by(0.019, 0.0, 0.0), TRUTH, 0.01) < 1.0
    assert ratio_of(off_by(0.030, 0.0, 0.0), TRUTH, 0.01) > 1.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_nan_and_misplaced_infinities_are_never_close(wrong):
    got = TRUTH.float()
    got[1] = wrong
    assert largest_error(got, TRUTH) == math.inf
    assert ratio_of(got, TRUTH, 1e6) == math.inf


def test_infinities_must_be_where_the_truth_has_them():
    truth = torch.tensor([-math.inf, 1.0], dtype=torch.float64)
    assert ratio_of(truth.float(), truth, 0.0) == 0.0
    assert ratio_of(torch.tensor([0.0, 1.0]), truth, 1.0) == math.inf
    assert ratio_of(torch.tensor([math.nan, 1.0]), truth, 1.0) == math.inf
    assert ratio_of(torch.tensor([-math.inf, 1.5]), truth, 0.0) > 1.0


def test_zero_truth_allows_no_error():
    assert ratio_of(torch.full((3,), 1e-30), torch.zeros(3, dtype=torch.float64), 0.0) == math.inf


def test_the_assertion_names_what_is_too_far():
    good, draws = Results(*[TRUTH.float()] * 5), [(Results(*[TRUTH] * 5)._asdict(),) * 2]
    assert_exact(good, Results(*[TRUTH] * 5), draws, 1.0, {})
    with pytest.raises(AssertionError, match=r"at most what is allowed; got\n(.*\n)*dk +1\.00e\+00"):
        assert_exact(good._replace(dk=TRUTH.float() + 1), Results(*[TRUTH] * 5), draws, 1.0, {})


def test_a_small_sum_of_large_numbers_is_judged_by_their_size():
    got = off_by(0.0, 0.0, 8 * EPS)
    assert ratio_of(got, TRUTH, 0.0) > 1.0
    assert ratio_of(got, TRUTH, 0.0, magnitude=16.0) == pytest.approx(0.5)


def test_the_plain_error_is_that_of_a_result_or_known():
    plain = off_by(0.0, 0.01, 0.0)
    assert error_of(off_by(0.0, 0.0, 0.015), TRUTH, plain) == error_of(
        off_by(0.0, 0.0, 0.015), TRUTH, largest_error(plain, TRUTH)
    )


def test_small_errors_everywhere_are_found_by_their_mean_square():
    truth = torch.ones(10_000, dtype=torch.float64)
    plain = (truth + 1e-3 * (torch.arange(10_000) % 100 == 0)).float()
    got = (truth + 0.9e-3).float()
    assert ratio_of(got, truth, plain) < 1.0 < ratio_of(got, truth, plain, rms=True)
    assert ratio_of(plain, truth, plain, rms=True) < 1.0
    with pytest.raises(
        TypeError, match=r"plain must be the plain result to judge the root-mean-square error; got 0\.1"
    ):
        error_of(got, truth, 0.1, rms=True)
    got[0] = math.nan
    assert ratio_of(got, truth, plain, rms=True) == math.inf


def test_an_error_that_is_no_number_is_above_any_yardstick():
    assert Error(math.nan, 1.0).ratio == Error(math.inf, math.inf).ratio == Error(0.0, 0.0, 1.0, 0.0).ratio == math.inf
    assert Error(0.0, 0.0).ratio == 0.0


def test_a_plain_computation_that_overflows_is_no_yardstick():
    assert Error(1.0, math.inf).ratio == Error(1.0, math.nan).ratio == math.inf
    overflown, fine = {"out": TRUTH.float() * math.inf}, {"out": off_by(0.0, 0.25, 0.0)}
    assert plain_errors([(overflown, {"out": TRUTH}), (fine, {"out": TRUTH})]) == {"out": 0.25}
    assert plain_errors([(overflown, {"out": TRUTH})]) == {"out": math.inf}


def test_results_without_values_are_exact():
    nothing = torch.zeros(0)
    assert ratio_of(nothing, nothing.double(), nothing, rms=True) == 0.0


def test_draws_end_with_the_first_that_suffices():
    errors = [math.inf, 0.25, 0.125, 0.5, 1.0]
    draws = iter([({"out": off_by(0.0, error, 0.0)}, {"out": TRUTH}) for error in errors])
    assert plain_errors(draws, until=lambda found: 0.5 <= found["out"] < math.inf) == {"out": 0.5}
    assert len(list(draws)) == 1


def test_few_values_are_measured_by_more_draws():
    assert [draws_for(queries, queries * 1000) for queries in (1, 255, 256, 4000, 5000)] == [16, 16, 4, 4, 1]


def test_fp64_is_measured_by_fp32():
    assert plain_dtype(torch.bfloat16) == (torch.bfloat16, 1.0)
    assert plain_dtype(torch.float64) == (torch.float32, 1.5 * 2.0**-29)


def test_plain_fp16_on_a_cpu_errs_as_pytorchs_own_products_do(monkeypatch):
    torch.manual_seed(0)
    tensors = [torch.randn(1, 4, 200, 64, dtype=torch.float16) for _ in range(4)]

    def results(dtype):
        q, k, v, dout = (x.to(dtype, copy=True) for x in tensors)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = reference.attention(*leaves, None, 0.125)
        return out, lse, *torch.autograd.grad(out, leaves, dout)

    def errors():
        return [(got.double() - true).square().mean().sqrt().item() for got, true in zip(results(torch.float16), truth)]

    truth = results(torch.float64)
    ours = errors()
    monkeypatch.setattr(reference, "_product", torch.matmul)
    assert ours == pytest.approx(errors(), rel=0.01)

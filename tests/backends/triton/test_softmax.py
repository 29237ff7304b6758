import pytest
import torch
import triton
import triton.language as tl

from sparseflash.backends.triton.device_functions.softmax import add_exactly, exp2_rounded
from sparseflash.backends.triton.launcher import OPTIONS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@triton.jit
def _powers_kernel(x_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out_ptr + at, exp2_rounded(tl.load(x_ptr + at)))


@triton.jit
def _sums_kernel(x_ptr, out_ptr, TERMS: tl.constexpr, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    total, lost = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    for term in range(TERMS):
        total, lost = add_exactly(total, lost, tl.load(x_ptr + term * LANES + lanes))
    tl.store(out_ptr + lanes, total)


def error_of(found, truth):
    """In units of 2^-23."""
    return ((found.double() - truth).abs() / truth).max().item() / torch.finfo(torch.float32).eps


@pytest.mark.parametrize("device", DEVICES)
def test_powers_of_two_are_right_to_within_an_ulp(device):
    x = torch.cat([torch.linspace(-1.5, 1.5, 3 * 2**14), torch.linspace(-120, 0, 2**14)]).to(device)
    found = torch.empty_like(x)
    _powers_kernel[(4,)](x, found, len(x) // 4, **OPTIONS)
    assert error_of(found, x.double().exp2()) <= 1.0
    edges = torch.tensor([0.0, -1.0, -126.0, -1000.0, -1e30, -torch.inf, torch.nan, 1.0], device=device)
    found = torch.empty_like(edges)
    _powers_kernel[(1,)](edges, found, len(edges), **OPTIONS)
    wanted = torch.tensor([1.0, 0.5, 2.0**-126, 0.0, 0.0, 0.0, torch.nan, 2.0], device=device)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_sums_of_many_terms_are_rounded_once(device):
    terms, lanes = 400, 64
    x = torch.rand(terms, lanes, generator=torch.Generator().manual_seed(0)).to(device)
    found = x.new_empty(lanes)
    _sums_kernel[(1,)](x, found, terms, lanes, **OPTIONS)
    truth = x.double().sum(0)
    plain = x.new_zeros(lanes)
    for row in x:
        plain += row
    assert error_of(found, truth) <= 1.0 < 3.0 < error_of(plain, truth)

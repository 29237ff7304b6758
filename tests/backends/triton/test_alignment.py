import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import attention, masks
from sparseflash.backends.triton import call_cache, launcher
from sparseflash.backends.triton.alignment import is_aligned, readable
from tests.drawn.problems import LAYOUTS, laid_out

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@given(
    st.tuples(*[st.integers(1, 4)] * 3, st.integers(16, 40)),
    st.sampled_from(LAYOUTS),
    st.sampled_from(DTYPES),
    st.integers(0, 8),
)
def test_a_copy_is_made_where_a_row_begins_off_a_multiple_of_16_bytes(shape, layout, dtype, first):
    x = laid_out(torch.rand(*shape[:-1], shape[-1] + first).to(dtype), layout)[..., first:]
    rows = {
        (x.data_ptr() + sum(i * s for i, s in zip(at, x.stride())) * x.element_size()) % 16
        for at in torch.cartesian_prod(*map(torch.arange, shape[:-1])).view(-1, 3).tolist()
    }
    assert is_aligned(x) == (rows == {0})
    got = readable(x)
    assert (got is x) == is_aligned(x)
    assert is_aligned(got) and got.stride(-1) == 1 and torch.equal(got, x)


@pytest.fixture
def launched(monkeypatch):
    given_tensors = []
    call = launcher.BoundLaunch.__call__
    dout = {"forward_kernel": [], "dq_kernel": ["dout_ptr"], "dk_dv_kernel": ["dout"]}

    def watched(self, given):
        given_tensors.extend(given[name] for name in ("q", "k", "v", *dout[self.launch.variant.function.__name__]))
        return call(self, given)

    monkeypatch.setattr(launcher.BoundLaunch, "__call__", watched)
    return given_tensors


@pytest.mark.parametrize("dim", [16, 18])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_are_given_aligned_rows_and_give_the_same_bits(launched, layout, dim):
    mask, generator = masks.local(40, window=9, block=16), torch.Generator().manual_seed(0)
    tensors = torch.randn(4, 2, 2, 40, dim, generator=generator).half()
    q, k, v, dout = (x.clone() for x in tensors)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    expected = attention(q, k, v, mask, backend="triton")
    expected_gradients = torch.autograd.grad(expected, (q, k, v), dout)
    launched.clear()
    q, k, v, dout = (laid_out(x, layout) for x in tensors)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, mask, backend="triton")
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert len(launched) == 11 and all(map(is_aligned, launched))
    assert torch.equal(out, expected)
    for got, wanted, x in zip(gradients, expected_gradients, (q, k, v), strict=True):
        assert torch.equal(got, wanted) and got.shape == x.shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repeated_calls_copy_too_and_return_what_the_first_one_does(launched, layout):
    mask, generator = masks.local(40, window=9, block=16), torch.Generator().manual_seed(0)
    q, k, v = (laid_out(x, layout) for x in torch.randn(3, 1, 2, 40, 18, generator=generator).half())
    first = attention(q, k, v, mask, backend="triton")
    calls, key = call_cache.place_of(q, k, v, mask, None, "portable", on_gpu_only=False)
    assert key in calls
    launched.clear()
    second = attention(q, k, v, mask, backend="triton")
    assert all(map(is_aligned, launched))
    assert torch.equal(first, second) and first.stride() == second.stride()

from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from triton.tools.tensor_descriptor import TensorDescriptor

from sparseflash import attention, masks, scores
from sparseflash.backends.problem import Problem
from sparseflash.backends.registration import empty_kept
from sparseflash.backends.saved import Saved
from sparseflash.backends.triton import prepared_call
from sparseflash.backends.triton.alignment import can_describe
from sparseflash.backends.triton.launch import launches
from sparseflash.backends.triton.overrides import override
from sparseflash.backends.triton.portable import pass_layout
from sparseflash.backends.triton.prepared_call import as_kernels_read, setting_of
from tests.backends.triton.plans import kernels_of
from tests.compared.exactness import loads

CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.float16: {"rtol": 2e-2, "atol": 2e-2}}

pytestmark = pytest.mark.usefixtures("small_blocks_of_dense_attention")


def wide(heads=4, tokens=40, dim=48, seed=0):
    return torch.randn(1, heads, tokens, dim, generator=torch.Generator().manual_seed(seed))


def assert_right(q, k, v, mask):
    tensors = [x.detach().requires_grad_() for x in (q, k, v)]
    results = []
    for backend in ("triton", "reference"):
        out, lse = attention(*tensors, mask, return_lse=True, backend=backend)
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), tensors)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, **CLOSE[q.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("masked", [True, False])
def test_one_mask_serves_tensors_that_differ_in_anything(masked, dtype):
    mask = masks.causal(10, block=16) if masked else None
    q, k, v = (wide(tokens=10, seed=seed).to(dtype) for seed in range(3))
    for slices in [
        (q, k, v),
        (q[..., :32], k[..., :32], v),
        (q[..., :16], k[..., :16], v),
        (q[..., :32], k[..., :32], v[..., :16]),
        (q, k[:, :2], v[:, :2]),
        (q, k[:, :1], v[:, :1]),
        (q[:, :2], k[:, :2], v[:, :2]),
        (q[..., 4:36], k[..., 4:36], v),  # another alignment
        (q[..., 1:33], k[..., 1:33], v[..., 3:19]),
        tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)),
        (q.half().to(dtype), k[..., :48], v.clone()),
    ]:
        assert_right(*slices, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("changed", ["no", "fixed", "learned"])
def test_the_kernels_of_a_backward_are_compiled_beside_those_of_its_forward(changed, dropout, dtype):
    q, k, v = (wide(seed=seed).to(dtype).requires_grad_() for seed in range(3))
    changes = None if changed == "no" else scores.alibi(torch.rand(4, requires_grad=changed == "learned"))
    compiled = []

    def begun(launches, fewest=2):
        compiled.append(({each.launch.variant.name for each in launches}, fewest))

    with mock.patch.object(prepared_call, "compile_side_by_side", begun):
        mask = masks.causal(40, block=16)
        out = attention(q, k, v, mask, scores=changes, dropout_p=dropout, seed=7, backend="triton")
        before = len(compiled)
        out.backward(torch.ones_like(out))
    # The forward's kernel begins before the backward is planned, even alone.
    assert compiled == [({"forward_kernel"}, 1), ({"dq_kernel", "dk_dv_kernel"}, 2)] and before == 2


def test_the_kernels_of_a_backward_after_a_call_without_gradients_are_compiled_side_by_side():
    q, k, v = (wide(seed=seed).half().requires_grad_() for seed in range(3))
    mask = masks.causal(40, block=16)
    with torch.no_grad():
        attention(q, k, v, mask, backend="triton")
    compiled = []
    with mock.patch.object(prepared_call, "compile_side_by_side", side_effect=compiled.append):
        attention(q, k, v, mask, backend="triton").sum().backward()
    names = [{each.launch.variant.function.__name__ for each in launches} for launches in compiled]
    assert names == [{"dq_kernel", "dk_dv_kernel"}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_call_without_gradients_prepares_no_backward(dtype):
    q, k, v = (wide(seed=seed).to(dtype).requires_grad_() for seed in range(3))
    learned = scores.alibi(torch.rand(4, requires_grad=True))
    with mock.patch.object(prepared_call.PreparedCall, "backward_pass", side_effect=AssertionError("a backward")):
        for without in (torch.no_grad(), torch.inference_mode()):
            for changes in (None, learned):
                with without:
                    attention(q, k, v, masks.local(40, window=9, block=16), scores=changes, backend="triton")
        with pytest.raises(AssertionError, match="a backward"):
            attention(q, k, v, masks.local(40, window=9, block=16), backend="triton")


def test_another_mask_of_the_same_kind_is_bound_to_the_same_variants():
    q, k, v = (wide(seed=seed).half().requires_grad_() for seed in range(3))
    with override():
        attention(q, k, v, masks.local(40, window=9, block=16), backend="triton").sum().backward()
        with mock.patch.object(launches, "Variant", side_effect=AssertionError("another variant")):
            attention(q, k, v, masks.local(40, window=25, block=16), backend="triton").sum().backward()
            with pytest.raises(AssertionError, match="another variant"):
                attention(q, k, v, masks.local(40, window=25, block=32), backend="triton")


@pytest.mark.parametrize(("way", "wanted"), [("descriptors", True), ("pointers", False)])
def test_tiles_are_loaded_the_way_that_is_asked_for(way, wanted):
    q, k, v = (x.half().requires_grad_() for x in (wide(dim=32), wide(dim=32, seed=1), wide(dim=32, seed=2)))
    mask = masks.local(40, window=9, block=16)
    with loads(way):
        attention(q, k, v, mask, backend="triton").sum().backward()
        assert {name: kernel.choice.descriptors for name, kernel in kernels_of(mask).items()} == {
            "forward": wanted, "dk_dv": wanted, "dq": wanted,
        }  # fmt: skip


@pytest.mark.parametrize("block", [16, 32])
def test_numbers_of_queries_come_by_descriptors_where_a_tile_of_them_is_128_bytes(block):
    """TMA writes to multiples of 128 bytes; only a GPU notices."""
    q, k, v = (wide(heads=2, dim=16, seed=seed).half().requires_grad_() for seed in range(3))
    mask = masks.local(40, window=9, block=block)
    attention(q, k, v, mask, backend="triton").sum().backward()
    kernel = kernels_of(mask)["dk_dv"]
    launch, work = kernel.launch.launch, kernel.launch.tensors
    arguments = launch.arguments([*work, *(torch.empty_like(x, device="cpu") for x in launch.examples.values())])
    numbers = dict(zip(launch.variant.names, arguments, strict=True))["lse2"]
    assert kernel.choice.descriptors and kernel.choice.config.block_m == block
    assert isinstance(numbers, TensorDescriptor) == (block >= 32)
    if block >= 32:
        assert numbers.shape == [2, 40] and numbers.block_shape == [1, block]


def test_descriptors_are_for_aligned_tensors_only():
    q = wide(dim=36).half()
    assert can_describe(q[..., :32].contiguous())
    assert not can_describe(q)
    assert not can_describe(wide(dim=32).half()[..., 1:])
    assert not can_describe(q[..., :32].contiguous()[:, :1].expand(-1, 4, -1, -1))  # broadcast


def test_examples_have_the_layout_of_what_the_kernels_read():
    for dtype in (torch.float16, torch.float32):
        for dim in (16, 18, 24):
            q, k, v = (wide(dim=dim + 8, tokens=300, seed=seed).to(dtype)[..., :dim] for seed in range(3))
            setting = setting_of(q, k, Problem.of(None, scale=1.0), (9, 0))
            layout = pass_layout.Layout(setting, q, k, v, 1.0, 0, None)
            for made, read in zip(layout.examples(q, k, v), layout.operands(q, k, v), strict=True):
                assert (made.shape, made.stride(), made.dtype) == (read.shape, read.stride(), read.dtype)
                assert made.is_meta


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9))
@example(1, 2, 1)
def test_kernels_find_both_kept_numbers_at_addresses_that_16_divides(batch, heads, rows):
    """They are compiled for such addresses, once for all sizes."""
    q, lse = torch.empty(batch, heads, rows, 16), torch.empty(batch, heads, rows)
    kept = empty_kept(q)
    assert kept.shape[0] == 2 and kept[0].numel() >= lse.numel()
    *_, saved = as_kernels_read(q, None, Saved(q, q, q, q, lse, kept))
    assert all(half.data_ptr() % 16 == 0 for half in saved.kept.unbind())

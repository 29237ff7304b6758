"""Launches are prepared once and kept: what is kept must be told apart by all that it depends on."""

from unittest import mock

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from sparseflash import attention, masks
from sparseflash.backends.triton import launch
from sparseflash.backends.triton.schedule.plan import Plan

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # of fp32 a kernel sees pieces, which are contiguous
@pytest.mark.parametrize("masked", [True, False])
def test_one_mask_serves_tensors_that_differ_in_anything(masked, dtype):
    """Pairs that share strides, or all but one thing: the second must not run what was prepared for the first."""
    mask = masks.causal(10, block=16) if masked else None
    q, k, v = (wide(tokens=10, seed=seed).to(dtype) for seed in range(3))
    for slices in [
        (q, k, v),
        (q[..., :32], k[..., :32], v),  # the same strides, another head dim
        (q[..., :16], k[..., :16], v),
        (q[..., :32], k[..., :32], v[..., :16]),
        (q, k[:, :2], v[:, :2]),  # the same strides, other groups
        (q, k[:, :1], v[:, :1]),
        (q[:, :2], k[:, :2], v[:, :2]),
        (q[..., 4:36], k[..., 4:36], v),  # another alignment
        (q[..., 1:33], k[..., 1:33], v[..., 3:19]),
        tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)),
        (q.half().to(dtype), k[..., :48], v.clone()),
    ]:
        assert_right(*slices, mask)


def test_a_second_call_prepares_nothing():
    q, k, v = wide(), wide(seed=1), wide(seed=2)
    mask = masks.local(40, window=9, block=16)
    attention(q, k, v, mask, backend="triton")
    with mock.patch.object(launch, "Launch", side_effect=AssertionError("prepared again")):
        attention(q, k, v, mask, backend="triton")
        attention(q * 2, k * 2, v * 2, mask, backend="triton")
    kept = [x for x in mask.indices._sparseflash.values() if isinstance(x, Plan)]
    assert len(kept) == 1
    assert len(kept[0].launches) == 1


@pytest.mark.parametrize(("products", "wanted"), [(0, True), (1 << 62, False)], ids=["descriptors", "pointers"])
def test_tiles_are_loaded_the_way_that_is_asked_for(products, wanted):
    """What the exactness tests call descriptors and pointers is what runs."""
    q, k, v = (x.half().requires_grad_() for x in (wide(dim=32), wide(dim=32, seed=1), wide(dim=32, seed=2)))
    mask = masks.local(40, window=9, block=16)
    with mock.patch.object(launch, "_PRODUCTS_FOR_DESCRIPTORS", products):
        attention(q, k, v, mask, backend="triton").sum().backward()
    (plan,) = (x for x in mask.indices._sparseflash.values() if isinstance(x, Plan))
    assert {key[0]: prepared.descriptors for key, prepared in plan.launches.items()} == {
        "forward": wanted, "dk_dv": wanted, "dq": wanted,
    }  # fmt: skip


@pytest.mark.parametrize("block", [16, 32])
def test_numbers_of_queries_come_by_descriptors_where_a_tile_of_them_is_128_bytes(block):
    """The copy engine writes to multiples of 128 bytes; the interpreter would not notice, a GPU stops."""
    q, k, v = (wide(heads=2, dim=16, seed=seed).half().requires_grad_() for seed in range(3))
    mask = masks.local(40, window=9, block=block)
    with mock.patch.object(launch, "_PRODUCTS_FOR_DESCRIPTORS", 0):
        attention(q, k, v, mask, backend="triton").sum().backward()
    (plan,) = (x for x in mask.indices._sparseflash.values() if isinstance(x, Plan))
    (prepared,) = (prepared for key, prepared in plan.launches.items() if key[0] == "dk_dv")
    numbers = prepared.rows(torch.empty(1, 2, 40))
    assert prepared.descriptors and prepared.config.block_m == block
    assert isinstance(numbers, TensorDescriptor) == (block >= 32)
    if block >= 32:
        assert numbers.shape == [2, 40] and numbers.block_shape == [1, block]


def test_descriptors_are_for_aligned_tensors_only():
    q = wide(dim=36).half()
    assert launch._can_describe(q[..., :32].contiguous())
    assert not launch._can_describe(q)  # rows of 72 bytes
    assert not launch._can_describe(wide(dim=32).half()[..., 1:])  # starts off a multiple of 16 bytes
    assert not launch._can_describe(q[..., :32].contiguous()[:, :1].expand(-1, 4, -1, -1))  # broadcast

"""Calls of the Hopper kernels with a new dynamic mask each time: no plan is made, and the bits are those of a plan."""

import gc
from unittest import mock

import pytest
import torch

from sparseflash import BlockMask, attention
from sparseflash.attention import KERNELS
from sparseflash.backends.triton import api, call_cache, dispatch, prepared_call
from sparseflash.backends.triton import device as gpu
from sparseflash.backends.triton.hopper import support
from sparseflash.backends.triton.persistent.backward_plan import BackwardPlan
from sparseflash.backends.triton.schedule import plan as planning
from sparseflash.backends.triton.schedule.worklists import Worklist
from tests.backends.triton.hopper.hopper_problems import interpreting
from tests.backends.triton.plans import counting_plans

FORMS = [(128, 64, 64), (128, 192, 128), (64, 64, 64), (64, 128, 128)]  # block, D and Dv


@pytest.fixture
def on_hopper(monkeypatch):
    """Calls on a CPU choose, plan and start the kernels as on a Hopper GPU."""
    monkeypatch.setattr(planning, "_DEVICES", ["cpu", "cuda"])
    monkeypatch.setattr(gpu, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(support, "is_interpreted", lambda: False)
    monkeypatch.setattr(api, "check", lambda *tensors: None)
    monkeypatch.setattr(prepared_call, "compile_side_by_side", lambda launches, **how: None)
    with interpreting():
        yield


def tensors(tokens, dim, v_dim, device="cpu", heads=2, kv_heads=1):
    draw = torch.Generator().manual_seed(tokens + dim)
    sizes = (heads, dim), (kv_heads, dim), (kv_heads, v_dim), (heads, v_dim)
    return [torch.randn(1, h, tokens, d, generator=draw).to(device, torch.bfloat16) for h, d in sizes]


def chosen(seed, tokens, block, device="cpu", choices=1, group=2, live=3):
    draw = torch.Generator().manual_seed(seed)
    blocks = -(-tokens // block)
    index = torch.rand(1, choices, blocks, blocks, generator=draw).topk(min(live, blocks)).indices.int()
    index[:, :, 0] = -1  # rows without a block
    return BlockMask.from_block_index(index.to(device), block=block, q_len=tokens, causal=True, group=group)


def differentiated(q, k, v, dout, mask, backend="hopper"):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, mask, backend=backend, return_lse=True)
    return out, lse, *torch.autograd.grad(out, leaves, dout)


def planned(*given):
    with mock.patch.object(call_cache, "place_of", return_value=None):
        return differentiated(*given)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_training_needs_no_plan_from_the_third_mask_on(on_hopper, form):
    block, *dims = form
    tokens = 2 * block + 40
    given = tensors(tokens, *dims)
    for seed, needed in enumerate((1, 1, 0, 0)):  # the second mask plans its backward, which is then known
        with counting_plans() as plans:
            got = differentiated(*given, chosen(seed, tokens, block))
        assert plans.call_count == needed
        for ours, theirs in zip(got, planned(*given, chosen(seed, tokens, block)), strict=True):
            assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


def test_a_mask_that_is_attended_again_is_planned_once(on_hopper):
    tokens = 200
    given = tensors(tokens, 64, 64)
    for seed in range(3):
        differentiated(*given, chosen(seed, tokens, 128))
    mask = chosen(7, tokens, 128)
    with counting_plans() as plans:
        got = [differentiated(*given, mask) for _ in range(3)]
    assert plans.call_count == 1
    for each in got:
        assert all(map(torch.equal, each, got[0]))


def test_batch_elements_and_heads_have_their_own_patterns(on_hopper):
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 4, 100, 64), (2, 2, 136, 64), (2, 2, 136, 64), (2, 4, 100, 64)  # of q, k, v and dout
    given = [torch.randn(shape, generator=draw).bfloat16() for shape in shapes]

    def mask(seed):
        index = torch.rand(2, 2, 2, 3, generator=torch.Generator().manual_seed(seed)).topk(2).indices.int()
        return BlockMask.from_block_index(index, block=64, q_len=100, k_len=136, causal=True, group=2)

    for seed, needed in enumerate((1, 1, 0)):
        with counting_plans() as plans:
            got = differentiated(*given, mask(seed))
        assert plans.call_count == needed
        assert all(map(torch.equal, got, planned(*given, mask(seed))))


@pytest.mark.parametrize("is_backward", [False, True])
def test_the_portable_kernels_may_serve_one_pass(on_hopper, monkeypatch, is_backward):
    hopper, portable = dispatch.FAMILIES
    hopper = hopper._replace(
        refuses=lambda request: "not here" if request.backward == is_backward else None, yields=lambda request: None,
        untested=lambda request: None,
    )  # fmt: skip
    monkeypatch.setattr(dispatch, "FAMILIES", (hopper, portable))
    monkeypatch.setitem(KERNELS, "triton", "")  # on a CPU, backend=None would take no kernels at all
    monkeypatch.setattr(prepared_call, "warn_if_slower", lambda request, decision: None)
    given = [x.half() for x in tensors(200, 64, 64)]  # Triton's interpreter computes bf16 wrongly
    for seed, needed in enumerate((1, 1, 0)):
        with counting_plans() as plans:
            got = differentiated(*given, chosen(seed, 200, 128), "triton")
        assert plans.call_count == needed
        assert all(map(torch.equal, got, planned(*given, chosen(seed, 200, 128), "triton")))


def test_the_host_reads_nothing(on_hopper):
    given = tensors(100, 64, 64)
    for seed in range(2):
        differentiated(*given, chosen(seed, 100, 128))
    mask = chosen(2, 100, 128)
    with mock.patch.object(torch.Tensor, "tolist", side_effect=AssertionError("the host would wait for the device")):
        differentiated(*given, mask)


@pytest.mark.parametrize("block", [64, 128])  # one backward in two kernels, one in one
def test_no_work_is_kept(on_hopper, block):
    def kept():
        gc.collect()
        return {id(x) for x in gc.get_objects() if isinstance(x, (planning.Plan, Worklist, BackwardPlan))}

    before, given = kept(), tensors(100, 64, 64)
    for seed in range(3):
        differentiated(*given, chosen(seed, 100, block))
    assert kept() <= before


@pytest.mark.gpu
@pytest.mark.timeout(240, method="thread")
@pytest.mark.parametrize("tokens", [700, 8192])
@pytest.mark.parametrize("form", [*FORMS, (128, 128, 128), (128, 256, 256), (64, 96, 96)], ids=str)
def test_on_a_gpu_the_bits_are_those_of_a_plan(form, tokens):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a GPU of compute capability 9")
    block, *dims = form
    given = tensors(tokens, *dims, device="cuda", heads=8, kv_heads=2)
    how = {"device": "cuda", "choices": 2, "group": 4, "live": 8}
    for seed in range(4):
        for backend in ("hopper", None):  # by default the families may be mixed
            got = differentiated(*given, chosen(seed, tokens, block, **how), backend)
            want = planned(*given, chosen(seed, tokens, block, **how), backend)
            assert all(map(torch.equal, got, want)), (seed, backend)

"""The forward with a new dynamic mask at every call: prepared once for all masks of one layout."""

import dataclasses
import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import attention, clear_caches, masks, scores
from sparseflash.backends.triton import call_cache, prepared_call
from sparseflash.backends.triton.dynamic_call import DynamicCall
from sparseflash.backends.triton.schedule import fused
from sparseflash.backends.triton.schedule import plan as planning
from tests.backends.triton.plans import counting_plans
from tests.drawn.counts import examples_times
from tests.drawn.dynamic_masks import dynamic_problems, made_dynamic

TOKENS = 70


@pytest.fixture(autouse=True)
def planned_by_kernels(monkeypatch):
    monkeypatch.setattr(planning, "_DEVICES", ["cpu", "cuda"])
    clear_caches()


def tensors(seed=0, heads=2, tokens=TOKENS, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, tokens, 16), (1, 1, tokens, 16), (1, 1, tokens, 16)]
    return [torch.randn(shape, generator=generator).half().to(device) for shape in shapes]


def chosen(seed, heads=2, tokens=TOKENS, device="cpu", **options):
    blocks = -(-tokens // 16)
    values = torch.rand(1, heads, blocks, blocks, generator=torch.Generator().manual_seed(seed)).to(device)
    return masks.top_k_blocks(values, k=2, q_len=tokens, block=16, causal=True, local_blocks=1, **options)


def run(q, k, v, mask, **options):
    return attention(q, k, v, mask, backend="triton", return_lse=True, **options)


def attend(q, k, v, mask):
    return attention(q, k, v, mask, return_lse=True)


def planned(q, k, v, mask, **options):
    """The same by a plan."""
    with mock.patch.object(call_cache, "place_of", return_value=None):
        return run(q, k, v, mask, **options)


def assert_equal(got, want):
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(got, want, strict=True))


@examples_times(1 / 3)
@given(dynamic_problems(most_tokens=70, most_heads=2, head_dims=(16, 24), blocks=(16, 32), dtypes=(torch.float16,)))
def test_it_has_the_bits_of_a_plan(problem):
    clear_caches()
    q, k, v = (x.detach() for x in problem.tensors()[:3])
    want = run(q, k, v, problem.mask, scale=problem.scale)
    for _ in range(2):
        mask = dataclasses.replace(problem.mask, indices=problem.mask.indices.clone())
        with counting_plans() as plans:
            assert_equal(run(q, k, v, mask, scale=problem.scale), want)
        needs_plan = mask.lengths is not None or (problem.scale is not None and problem.scale <= 0)
        assert plans.call_count == needs_plan


def of_keys(seed):
    values = torch.rand(1, 2, TOKENS, TOKENS, generator=torch.Generator().manual_seed(seed))
    return masks.top_k_keys(values, k=5, k_len=TOKENS, block=16)


def test_a_mask_of_a_known_layout_is_attended_with_its_own_bits():
    q, k, v = tensors()
    with counting_plans() as plans:
        got = [run(q, k, v, of_keys(seed)) for seed in range(3)]
    assert plans.call_count == 1
    for seed, each in enumerate(got):
        assert_equal(each, planned(q, k, v, of_keys(seed)))


def test_a_mask_that_is_attended_again_is_planned_for_later_calls():
    run(*tensors(), chosen(0))
    mask = chosen(1)
    with counting_plans() as plans:
        got = [run(*tensors(seed), mask) for seed in range(4)]
        assert plans.call_count == 1
    for seed, each in enumerate(got):
        assert_equal(each, planned(*tensors(seed), chosen(1)))


def differentiated(q, k, v, mask, dout, dlse=None, call=run, **options):
    """`(out, lse, dq, dk, dv)`."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    results = call(*leaves, mask, **options)
    given = (dout,) if dlse is None else (dout, dlse)
    return *results, *torch.autograd.grad(results[: len(given)], leaves, given, retain_graph=True)


def test_training_needs_no_plans_from_the_third_mask_on():
    q, k, v = tensors()
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    for seed, needed in enumerate((1, 1, 0, 0)):  # the second mask plans its backward, which is then known
        with counting_plans() as plans:
            got = differentiated(q, k, v, chosen(seed), dout)
        assert plans.call_count == needed
        assert_equal(got, differentiated(q, k, v, chosen(seed), dout, call=planned))


def test_a_backward_in_other_tiles_than_the_forward_has_work_of_its_own():
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = [torch.randn(1, heads, 150, 192, generator=draw).half() for heads in (2, 1, 1, 2)]
    for _ in range(3):
        values = torch.rand(1, 2, 2, 2, generator=draw)
        given = q, k, v, masks.top_k_blocks(values, k=1, q_len=150, block=128), dout
        again = q, k, v, masks.top_k_blocks(values, k=1, q_len=150, block=128), dout
        assert_equal(differentiated(*given), differentiated(*again, call=planned))


def test_a_backward_of_sorted_columns_needs_a_plan(monkeypatch):
    monkeypatch.setattr(fused, "_MOST_ROWS", 1)
    q, k, v = tensors()
    for seed in range(3):
        with counting_plans() as plans:
            differentiated(q, k, v, chosen(seed), q)
        assert plans.call_count == 1


def test_masks_that_kernels_do_not_plan_need_plans(monkeypatch):
    monkeypatch.setattr(planning, "_DEVICES", ["cuda"])
    run(*tensors(), chosen(0))
    assert not call_cache._dynamic_calls


@examples_times(1 / 3)
@given(
    dynamic_problems(most_tokens=70, most_heads=4, head_dims=(16, 24), blocks=(16, 32), dtypes=(torch.float16,)),
    st.booleans(),
)
def test_gradients_have_the_bits_of_plans(problem, through_lse):
    clear_caches()
    q, k, v, dout, dlse = problem.tensors()
    dlse = dlse if through_lse else None
    want = differentiated(q, k, v, problem.mask, dout, dlse, call=planned, scale=problem.scale)
    for _ in range(4):
        mask = dataclasses.replace(problem.mask, indices=problem.mask.indices.clone())
        assert_equal(differentiated(q, k, v, mask, dout, dlse, scale=problem.scale), want)


def test_a_gradient_that_kernels_cannot_read_is_copied_once():
    for seed in range(3):
        leaves = [x.requires_grad_() for x in tensors()]
        out, _ = run(*leaves, chosen(seed))
        read = mock.patch.object(prepared_call, "as_kernels_read", side_effect=prepared_call.as_kernels_read)
        with read as copies:
            torch.autograd.grad(out.sum(), leaves)  # one number, expanded
        assert copies.call_count == 1


def test_other_gradients_take_the_longer_way():
    q, k, v = tensors()
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    for seed in range(3):
        differentiated(q, k, v, chosen(seed), dout)
    want = [differentiated(q, k, v, chosen(5), x, call=planned)[2:] for x in (dout, 2 * dout)]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, _ = run(*leaves, chosen(5))
    for _ in range(2):  # the graph is kept
        assert_equal(torch.autograd.grad(out, leaves, dout, retain_graph=True), want[0])
    inside = dout.transpose(1, 2).contiguous().transpose(1, 2)
    assert_equal(torch.autograd.grad(out, leaves, inside, retain_graph=True), want[0])
    several = torch.autograd.grad(out, leaves, torch.stack([dout, 2 * dout]), is_grads_batched=True, retain_graph=True)
    for each, *of_gradients in zip(several, *want, strict=True):
        torch.testing.assert_close(each, torch.stack(of_gradients), rtol=2e-3, atol=2e-3)
    (first, *_) = torch.autograd.grad(out, leaves, dout, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match="gradients of"):
        torch.autograd.grad(first.sum(), leaves)
    again = torch.utils.checkpoint.checkpoint(lambda *x: run(*x, chosen(5))[0], *leaves, use_reentrant=False)
    assert_equal(torch.autograd.grad(again, leaves, dout), want[0])


def test_lengths_and_score_modifications_take_the_longer_way():
    q, k, v = tensors()
    run(q, k, v, chosen(0))
    with mock.patch.object(DynamicCall, "serves", side_effect=AssertionError("served")):
        with pytest.raises(AssertionError, match="served"):
            run(q, k, v, chosen(1))
        run(q, k, v, chosen(1).with_lengths([40]))
        slopes = torch.ones(2, requires_grad=True)
        assert run(q, k, v, chosen(1), scores=scores.alibi(slopes))[0].requires_grad
        run(q.float(), k.float(), v.float(), chosen(1))
        attention(q, k, v, chosen(1), backend="triton", dropout_p=0.5, seed=1)
        with torch.no_grad(), pytest.raises(AssertionError, match="served"):
            run(q.clone().requires_grad_(), k, v, chosen(1))


def unaligned(bits):
    """The same numbers at an address that is no multiple of 16."""
    copy = bits.new_empty(bits.numel() + 1)[1:].view_as(bits).copy_(bits)
    assert copy.data_ptr() % 16
    return copy


def test_other_layouts_have_forwards_of_their_own():
    q, k, v = tensors()
    inside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    beside = [torch.cat([x, x], -1)[..., 1:17] for x in (q, k, v)]  # rows are no multiples of 16 bytes
    shared = made_dynamic(masks.local(TOKENS, window=20, block=16), seed=0)
    others = dataclasses.replace(shared, bits=unaligned(shared.bits))
    calls = [
        ((q, k, v), chosen, {}), (inside, chosen, {}), (beside, chosen, {}), ((q, k, v), chosen, {"scale": 0.5}),
        ((q, k, v), lambda seed: chosen(seed, heads=1), {}), ((q, k, v), lambda seed: chosen(seed, sink_blocks=1), {}),
        ((q, k, v), lambda seed: dataclasses.replace(others, indices=others.indices.clone()), {}),
    ]  # fmt: skip
    for _ in range(2):
        for seed in range(2):
            for given_tensors, make, options in calls:
                want = planned(*given_tensors, make(seed), **options)
                assert_equal(run(*given_tensors, make(seed), **options), want)


def test_mistakes_are_told_after_a_call_that_was_right():
    q, k, v = tensors()
    for seed in range(2):
        run(q, k, v, chosen(seed))
    with pytest.raises(ValueError, match="mask must be for the lengths of q and k"):
        run(q, k, v, chosen(2, tokens=TOKENS - 16))
    with pytest.raises(ValueError, match="mask must be for 1 or 2 heads"):
        run(q, k, v, chosen(2, heads=3))
    with pytest.raises(ValueError, match="the same heads and tokens"):
        run(q, k, v[:, :, 1:], chosen(2))


def test_no_mask_is_kept_and_few_forwards_are():
    q, k, v = tensors()
    held = []
    for number in range(call_cache._MOST + 3):
        mask = chosen(number)
        held += [weakref.ref(x) for x in (mask.indices, mask.tile, mask.indptr)]
        run(q, k, v, mask, scale=0.1 + number / 100)
        assert 0 < len(call_cache._dynamic_calls) <= call_cache._MOST
    del mask
    gc.collect()
    assert not any(each() is not None for each in held)
    clear_caches()
    assert not call_cache._dynamic_calls


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [70, 1000, 40000])
def test_on_a_gpu_the_bits_are_those_of_a_plan(tokens):
    q, k, v = tensors(tokens=tokens, device="cuda")
    for seed in range(3):
        mask = chosen(seed, tokens=tokens, device="cuda")
        got = attention(q, k, v, mask, return_lse=True)
        with mock.patch.object(call_cache, "place_of", return_value=None):
            want = attention(q, k, v, chosen(seed, tokens=tokens, device="cuda"), return_lse=True)
        assert_equal(got, want)
        dout = torch.randn_like(q)
        for _ in range(3):
            got = differentiated(q, k, v, chosen(seed, tokens=tokens, device="cuda"), dout, call=attend)
        with mock.patch.object(call_cache, "place_of", return_value=None):
            want = differentiated(q, k, v, chosen(seed, tokens=tokens, device="cuda"), dout, call=attend)
        assert_equal(got, want)


@pytest.mark.gpu
def test_a_graph_lists_the_work_anew_at_every_replay():
    q, k, v = tensors(device="cuda")
    values = torch.rand(1, 2, 5, 5, device="cuda")

    def step():
        return attention(q, k, v, masks.top_k_blocks(values, k=2, q_len=TOKENS, block=16, causal=True))

    for _ in range(2):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(3):
        values.copy_(torch.rand(1, 2, 5, 5, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(out, step())

import gc
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sparseflash import attention, clear_caches, masks, scores
from sparseflash.backends.triton import api, call_cache, prepared_call
from tests.drawn.counts import examples_times
from tests.drawn.masks import SEEDS

HEADS, TOKENS = 2, 24


def random(seed):
    return torch.Generator().manual_seed(seed)


def inputs(seed=0, dtype=torch.float16, kv_heads=HEADS, dim=16, inside=False):
    generator, order = random(seed), (0, 2, 1, 3) if inside else (0, 1, 2, 3)  # inside: tokens before heads in memory
    shapes = ([1, heads, TOKENS, dim] for heads in (HEADS, kv_heads, kv_heads))
    return [torch.randn([shape[n] for n in order], generator=generator).to(dtype).permute(order) for shape in shapes]


def mask_of():
    return masks.local(TOKENS, window=16, block=16)


def gain_of_heads(score, b, h, q, k, gain):
    return score * gain[h]


OWN = scores.function(gain_of_heads, torch.ones(HEADS))
KINDS = {
    "plain": ((HEADS,), lambda x: None),
    "alibi": ((HEADS,), scores.alibi),
    "log decay": ((HEADS,), scores.log_decay),
    "t5": ((HEADS, 8), lambda x: scores.relative(x, scores.t5_buckets(x.shape[1], 20))),
    "clipped": ((HEADS, 8), lambda x: scores.relative(x, scores.clipped(x.shape[1] // 2 - 1))),
    "bias": ((1, HEADS, TOKENS, TOKENS), scores.bias),
    "key bias": ((1, HEADS, TOKENS), scores.key_bias),
    "sink": ((HEADS,), scores.sink),
    "softcap": ((HEADS,), lambda x: scores.alibi(x) + scores.softcap(2.0)),
    "other softcap": ((HEADS,), lambda x: scores.alibi(x) + scores.softcap(1.0)),
    "function": ((HEADS,), lambda x: OWN.with_tensors([x])),
    "temperature": ((HEADS,), lambda x: scores.temperature(x.abs() + 1)),
}


def drawn(kind, seed=0, *, dtype=torch.float32, learned=True, layout="contiguous"):
    shape, change = KINDS[kind]
    if layout == "shared" and len(shape) > 2:
        shape = (1, 1, *shape[2:])
    if layout == "wider" and kind in ("t5", "clipped"):
        shape = HEADS, 12
    x = torch.randn(shape, generator=random(seed)).to(dtype)
    if layout == "strided":
        x = torch.stack([x, x + 1], -1)[..., 0]
    if layout == "transposed" and len(shape) > 1:
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "unaligned":
        x = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(shape)
    x = x.detach().requires_grad_(learned and kind != "plain")
    return change(x), x


LAYOUTS = ("contiguous", "shared", "wider", "strided", "transposed", "unaligned")


def results(change, x, mask, tensors, *, lse=True, mode="training", **options):
    options |= {"scores": change, "backend": "triton", "return_lse": True}
    with np.errstate(over="ignore", invalid="ignore"):
        if mode != "training":
            with torch.inference_mode() if mode == "inference" else torch.no_grad():
                return list(attention(*tensors, mask, **options))
        q, k, v = (each.detach().requires_grad_() for each in tensors)
        out, own_lse = attention(q, k, v, mask, **options)
        wanted = [q, k, v, *([x] if x.requires_grad else [])]
        loss = out.float().sin().sum() + (own_lse.sum() if lse else 0)
        return [out.detach(), own_lse.detach(), *torch.autograd.grad(loss, wanted)]


def same(found, wanted):
    return len(found) == len(wanted) and all(
        torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride() for a, b in zip(found, wanted)
    )


def anew():
    return mock.patch.object(call_cache, "place_of", return_value=None)


def planned():
    return mock.patch.object(prepared_call, "setting_of", wraps=prepared_call.setting_of)


@pytest.fixture(autouse=True)
def forget():
    call_cache._dense_calls.clear()


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"temperature"}))
@pytest.mark.parametrize("masked", [True, False])
def test_a_repeat_plans_nothing_and_gives_what_a_first_call_gives(kind, masked):
    mask = mask_of() if masked else None
    results(*drawn(kind, 0), mask, inputs(0))
    with planned() as plans, mock.patch.object(api, "check", wraps=api.check) as checks:
        found = results(*drawn(kind, 1), mask, inputs(1))
    assert plans.call_count == checks.call_count == 0
    with anew():
        assert same(found, results(*drawn(kind, 1), mask, inputs(1)))


@examples_times(1 / 2)
@given(
    st.lists(
        st.fixed_dictionaries({
            "kind": st.sampled_from(sorted(KINDS)), "layout": st.sampled_from(LAYOUTS), "learned": st.booleans(),
            "dtype": st.sampled_from([torch.float32, torch.float16]), "seed": SEEDS, "masked": st.booleans(),
            "length": st.sampled_from([None, None, 17, 7, 0]), "scale": st.sampled_from([None, None, 0.5, -0.5]),
            "mode": st.sampled_from(["training", "training", "inference", "no_grad"]), "lse": st.booleans(),
            "kv_heads": st.sampled_from([1, 2]), "dim": st.sampled_from([16, 24]), "inside": st.booleans(),
        }),
        min_size=2,
        max_size=3,
    )
)  # fmt: skip
def test_calls_of_any_order_do_not_disturb_one_another(calls):
    call_cache._dense_calls.clear()
    mask, wanted = mask_of(), {}
    for number, each in [*enumerate(calls), *enumerate(calls)]:
        own = mask if each["length"] is None else mask.with_lengths([each["length"]])

        def result(each=each, own=own):
            call = drawn(each["kind"], each["seed"], **{name: each[name] for name in ("dtype", "learned", "layout")})
            options = {"lse": each["lse"], "mode": each["mode"], "scale": each["scale"]}
            given = inputs(**{name: each[name] for name in ("seed", "kv_heads", "dim", "inside")})
            return results(*call, own if each["masked"] else None, given, **options)

        found = result()
        if number not in wanted:
            with anew():
                wanted[number] = result()
        assert same(found, wanted[number])


BASE = {"kind": "t5", "layout": "contiguous", "dtype": torch.float32}


@pytest.mark.parametrize(
    "other",
    [
        {"kind": "clipped"}, {"layout": "wider"}, {"layout": "strided"}, {"layout": "transposed"},
        {"layout": "unaligned"}, {"dtype": torch.float16}, {"kind": "alibi"}, {"kind": "function"},
    ],
    ids=str,
)  # fmt: skip
def test_what_launches_depend_on_is_in_the_key(other):
    """Including alignment, which Triton's interpreter ignores."""
    mask, tensors = mask_of(), inputs()
    results(*drawn(**BASE), mask, tensors, mode="no_grad")
    with planned() as plans:
        results(*drawn(**BASE, seed=1, learned=False), mask, tensors, mode="no_grad")
        assert plans.call_count == 0
        results(*drawn(**(BASE | other)), mask, tensors, mode="no_grad")
        assert plans.call_count == (0 if other == {"kind": "clipped"} else 1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (scores.softcap(1.0), scores.softcap(2.0)),
        (scores.alibi(torch.ones(HEADS)), scores.log_decay(torch.ones(HEADS))),
        (OWN, scores.function(gain_of_heads, torch.ones(HEADS))),
        (scores.sink(torch.ones(HEADS)), scores.alibi(torch.ones(HEADS))),
    ],
    ids=["number", "integer", "function", "kind"],
)
def test_changes_with_equal_tensors_have_keys_of_their_own(one, other):
    keys = [scores.Scores((each,)).key() for each in (one, other)]
    assert keys[0] != keys[1]
    assert keys[0] == scores.Scores((one.with_tensors([x + 1 for x in one.tensors()]),)).key()


@pytest.mark.parametrize("kind", ["alibi", "bias", "key bias", "sink", "function"])
@pytest.mark.parametrize("other", [{"layout": "strided"}, {"layout": "unaligned"}, {"dtype": torch.float16}], ids=str)
def test_a_repeat_that_skips_the_checks_has_tensors_of_the_same_layout(kind, other):
    mask, tensors = mask_of(), inputs()
    base = {"kind": kind, "layout": "contiguous", "dtype": torch.float32, "learned": False}
    results(*drawn(**base), mask, tensors, mode="no_grad")
    with mock.patch.object(call_cache, "first", wraps=call_cache.first) as prepared:
        results(*drawn(**base, seed=1), mask, tensors, mode="no_grad")
        assert prepared.call_count == 0
        found = results(*drawn(**(base | other), seed=1), mask, tensors, mode="no_grad")
        assert prepared.call_count == 1
    with anew():
        assert same(found, results(*drawn(**(base | other), seed=1), mask, tensors, mode="no_grad"))


def test_changed_values_of_the_same_tensor_are_read_at_every_call():
    mask, tensors = mask_of(), inputs()
    change, slopes = drawn("alibi", learned=False)
    first = results(change, slopes, mask, tensors, mode="no_grad")
    slopes.mul_(2.0)
    found = results(change, slopes, mask, tensors, mode="no_grad")
    with anew():
        assert same(found, results(change, slopes, mask, tensors, mode="no_grad")) and not same(found, first)


def test_tensors_of_another_device_have_keys_of_their_own():
    one = torch.ones(HEADS)
    keys = [scores.Scores((scores.alibi(x),)).key() for x in (one, torch.empty_like(one, device="meta"))]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("kind", ["t5", "key bias"])
def test_changes_that_are_replaced_before_the_kernels_are_replaced_at_every_call(kind):
    """A table by distance, and a bias that is the same for all queries."""
    mask, tensors = mask_of(), inputs()
    for seed in range(3):
        change, x = drawn(kind, seed)
        if kind == "key bias":
            change = scores.bias(x[:, :, None])
        found = results(change, x, mask, tensors)
        with anew():
            assert same(found, results(change, x, mask, tensors))


def test_tables_of_equal_strides_and_other_sizes_are_not_mixed_up():
    mask, tensors = mask_of(), inputs()
    table = torch.randn(HEADS, 12, generator=random(0))
    for columns in (12, 6, 12):
        part = table[:, :columns].detach().requires_grad_()
        change = scores.relative(part, scores.clipped(2))
        found = results(change, part, mask, tensors)
        with anew():
            assert same(found, results(change, part, mask, tensors))


def test_a_temperature_whose_queries_have_another_layout_is_no_repeat():
    mask, (q, k, v) = mask_of(), inputs()
    shared = q[:, :1].expand_as(q)
    for divide in (False, True, False):
        change, slopes = drawn("alibi")
        change = change + scores.temperature(torch.tensor([0.5, 2.0])) if divide else change
        found = results(change, slopes, mask, [shared, k, v], mode="no_grad")
        with anew():
            assert same(found, results(change, slopes, mask, [shared, k, v], mode="no_grad"))


def test_which_gradients_are_wanted_is_asked_at_every_call():
    mask, tensors = mask_of(), inputs()
    for learned in (True, False, True):
        pair = torch.randn(1, HEADS, TOKENS, TOKENS, generator=random(1)).requires_grad_(not learned)
        change, slopes = drawn("alibi", learned=learned)
        with anew():
            wanted = attention(*tensors, mask, scores=change + scores.bias(pair), backend="triton")
        found = attention(*tensors, mask, scores=change + scores.bias(pair), backend="triton")
        leaf = slopes if learned else pair
        assert same(*([torch.autograd.grad(each.float().sin().sum(), leaf)[0]] for each in (found, wanted)))


@pytest.mark.parametrize("kind", ["alibi", "t5", "bias", "function"])
def test_no_tensor_of_a_change_is_kept(kind):
    mask, tensors = mask_of(), inputs()
    for mode in ("training", "inference", "training"):
        change, x = drawn(kind)
        learned = weakref.ref(x)
        results(change, x, mask, tensors, mode=mode)
        del change, x
        gc.collect()
        assert learned() is None


def test_a_function_that_was_made_for_one_call_is_no_other():
    mask, tensors = mask_of(), inputs()
    for factor in (1.0, 2.0):
        change = scores.function(lambda s, b, h, q, k, x, factor=factor: s * x[h] * factor, torch.ones(HEADS))
        with anew():
            wanted = results(change, torch.ones(1), mask, tensors)
        assert same(results(change, torch.ones(1), mask, tensors), wanted)


def test_the_cache_is_bounded_dies_with_the_mask_and_is_emptied():
    mask, tensors, change = mask_of(), inputs(), scores.alibi(torch.ones(HEADS))
    calls, _ = call_cache.place_of(*tensors, mask, None, "portable", on_gpu_only=False)
    with mock.patch.object(prepared_call, "PreparedCall", wraps=prepared_call.PreparedCall) as made:
        for number in range(call_cache._MOST + 3):
            attention(*tensors, mask, scores=change + scores.softcap(1.0 + number), backend="triton")
    assert made.call_count == call_cache._MOST + 3 and len(calls) == 3
    clear_caches()
    assert not calls
    alive = weakref.ref(calls)
    del calls, mask
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("kind", ["plain", "t5"])
def test_a_gradient_may_come_after_the_mask_is_gone_and_the_caches_are_empty(kind):
    mask, tensors = mask_of(), [x.requires_grad_() for x in inputs()]
    change, x = drawn(kind)
    results(change, x, mask, tensors)
    out, again = (attention(*tensors, mask, scores=change, backend="triton") for _ in range(2))
    wanted = [*tensors, *([x] if x.requires_grad else [])]
    expected = torch.autograd.grad(again.float().sin().sum(), wanted)
    del mask, again
    clear_caches()
    assert same(torch.autograd.grad(out.float().sin().sum(), wanted), expected)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("kind", ["alibi", "function"])
def test_who_enters_after_a_repeat_sees_its_backward_through_the_operator(kind):
    mask, tensors = mask_of(), [x.requires_grad_() for x in inputs()]
    change, x = drawn(kind)
    wanted = results(change, x, mask, tensors)[2:]
    out, lse = attention(*tensors, mask, scores=change, backend="triton", return_lse=True)
    loss = out.float().sin().sum() + lse.sum()
    with Watching():
        assert same(torch.autograd.grad(loss, (*tensors, x), retain_graph=True), wanted)
    first = torch.autograd.grad(loss, (*tensors, x), create_graph=True)
    assert same([each.detach() for each in first], wanted)
    with pytest.raises(NotImplementedError, match="gradients of gradients are not implemented by the triton backend"):
        torch.autograd.grad(first[0].sum(), tensors[0])


def test_a_tensor_of_another_class_is_left_to_the_operator():
    class Subclass(torch.Tensor):
        pass

    mask, tensors = mask_of(), inputs()
    change, x = drawn("alibi", learned=False)
    wanted = results(change, x, mask, tensors, mode="no_grad")
    operator = api.attention
    with mock.patch.object(operator, "_scored_forward_op", wraps=operator._scored_forward_op) as called:
        found = results(scores.alibi(x.as_subclass(Subclass)), x, mask, tensors, mode="no_grad")
    assert called.call_count == 1 and same(found, wanted)


def test_a_repeat_is_told_from_a_mistake():
    mask, (q, k, v) = mask_of(), inputs()
    change, _ = drawn("alibi")
    attention(q, k, v, mask, scores=change, backend="triton")
    with pytest.raises(ValueError, match="slopes must have one entry for each of the 2 query heads; got 3"):
        attention(q, k, v, mask, scores=scores.alibi(torch.ones(3)), backend="triton")
    with pytest.raises(ValueError, match="the same heads and tokens"):
        attention(q, k, v[:, :, :-1], mask, scores=change, backend="triton")
    with pytest.raises(TypeError, match=r"scores must be made by sparseflash\.scores"):
        attention(q, k, v, mask, scores=torch.ones(HEADS), backend="triton")

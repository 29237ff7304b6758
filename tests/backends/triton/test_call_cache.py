import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sparseflash
from sparseflash import attention, attention_varlen, masks, scores
from sparseflash.backends import blockwise
from sparseflash.backends.problem import Problem
from sparseflash.backends.triton import api, call_cache, native, prepared_call
from sparseflash.backends.triton.launch.launches import _specialised
from sparseflash.backends.triton.launcher import Variant
from sparseflash.backends.triton.overrides import override
from sparseflash.backends.triton.portable import forward_pass
from sparseflash.backends.triton.prepared_call import key_of, setting_of

TOKENS = 40


def tensors(seed=0, heads=2, kv_heads=2, tokens=TOKENS, dim=16, dtype=torch.float16, inside=False):
    g = torch.Generator().manual_seed(seed)
    shapes = [(1, tokens, h, dim) if inside else (1, h, tokens, dim) for h in (heads, kv_heads, kv_heads)]
    found = [torch.randn(shape, generator=g).to(dtype) for shape in shapes]
    return [x.transpose(1, 2) if inside else x for x in found]


def mask_of(tokens=TOKENS):
    return masks.local(tokens, window=16, block=16)


def counted():
    return mock.patch.object(api, "check", wraps=api.check)


def place_of(q, k, v, mask, scale=None):
    return call_cache.place_of(q, k, v, mask, scale, "portable", on_gpu_only=False)


def run(q, k, v, mask=None, **options):
    return attention(q, k, v, mask, backend="triton", return_lse=True, **options)


@pytest.fixture(autouse=True)
def forget():
    call_cache._dense_calls.clear()


def test_calls_that_differ_in_anything_have_keys_of_their_own():
    """Also if they differ in alignment, which Triton's interpreter ignores."""
    base, mask = [x[..., :16] for x in tensors(tokens=48, dim=24)], mask_of()

    def others(x):
        beside = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape).as_strided(x.shape, x.contiguous().stride())
        return x[:, :, :40], x[..., :8], x[:, :1], x.contiguous(), beside, x.bfloat16(), x.transpose(2, 3)

    given = [(base, None), *((base, scale) for scale in (0.1, 0.5, -0.5))]
    for number, x in enumerate(base):
        given += [([*base[:number], other, *base[number + 1 :]], None) for other in others(x)]
    for same_mask in (mask, None):
        places = [call_cache.place_of(*each, same_mask, scale, "", on_gpu_only=False) for each, scale in given]
        places += [
            call_cache.place_of(*base, same_mask, None, name, on_gpu_only=False) for name in ("portable", "hopper")
        ]
        assert all(calls is places[0][0] for calls, _ in places)
        keys = [key for _, key in places]
        assert len(set(keys)) == len(keys)
        assert call_cache.place_of(*base, same_mask, None, "", on_gpu_only=False)[1] == keys[0]
    padded = call_cache.place_of(*base, mask.with_lengths([30]), None, "", on_gpu_only=False)
    assert padded[1] not in keys and padded[0] is call_cache.place_of(*base, mask, None, "", on_gpu_only=False)[0]


def test_launches_that_differ_in_anything_have_keys_of_their_own():
    q, k, v = tensors()
    problem = Problem.of(mask_of(), scale=0.25)
    setting = setting_of(q, k, problem, (9, 0))
    beside = torch.cat([k.new_zeros(1), k.flatten()])[1:].view(k.shape)
    keys = [
        key_of(setting._replace(**changed), problem._replace(**other), *given)
        for changed, other, given in [
            ({}, {}, (q, k, v)),
            *[({name: not getattr(setting, name)}, {}, (q, k, v)) for name in ("tf32", "lengths", "dropout")],
            ({"capability": (8, 0)}, {}, (q, k, v)),
            ({"block": (16, 32)}, {}, (q, k, v)),
            ({"coordinates": ("rows",)}, {}, (q, k, v)),
            ({}, {"scale": 0.5}, (q, k, v)),
            ({}, {"dropped": 3}, (q, k, v)),
            ({}, {"kernels": "portable"}, (q, k, v)),
            ({}, {}, (q.bfloat16(), k, v)),
            ({}, {}, (q[:, :, :8], k, v)),
            ({}, {}, (q, beside, v)),
            ({}, {}, (q, k.transpose(1, 2).contiguous().transpose(1, 2), v)),
        ]
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)


def functions_of(call, after=2):
    """The library's functions that a call runs after this many others, in order, as on a GPU."""
    folder, found = f"{Path(sparseflash.__file__).parent}{os.sep}", []

    def called(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            found.append(frame.f_code.co_name)

    class Kernel:
        def bound(self, programs, tensors):
            return self

        def start(self, *given):
            found.append("started")

    def start(kernels, given, stream):
        found.append("started")

    before = sys.getprofile()
    with (
        override(),
        mock.patch.object(Variant, "can_start_directly", lambda self: found.append("asked") or True),
        mock.patch.object(Variant, "kernel", lambda self, *given: Kernel()),
        mock.patch.object(native.module(), "start", start),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True),
    ):
        for _ in range(after):
            call()
        found.clear()
        sys.setprofile(called)
        try:
            call()
        finally:
            sys.setprofile(before)
    return found


@pytest.mark.parametrize(
    ("change", "most"),
    [
        (lambda x: None, 19), (scores.alibi, 40), (scores.sink, 40), (lambda x: scores.softcap(30.0), 40),
        (lambda x: scores.alibi(x) + scores.softcap(30.0), 45),
    ],
    ids=["plain", "alibi", "sink", "softcap", "alibi and softcap"],
)  # fmt: skip
@pytest.mark.parametrize("learned", [True, False])
def test_a_repeat_is_short(change, most, learned):
    q, k, v = (x.requires_grad_(learned) for x in tensors())
    mask, changes = mask_of(), change(torch.rand(2, requires_grad=learned))
    found = functions_of(lambda: attention(q, k, v, mask, scores=changes, backend="triton"))
    assert found.count("started") == 1 and len(found) <= most, found


@pytest.mark.parametrize(("learned", "most"), [(False, 300), (True, 470)])
def test_a_first_call_examines_each_tensor_once(learned, most):
    q, k, v = (x.requires_grad_(learned) for x in tensors())
    mask = mask_of()
    found = functions_of(lambda: attention(q, k, v, mask, backend="triton"), after=0)
    # The checks of the arguments look at q, k and v before.
    assert found.count("is_readable") == (7 if learned else 3)
    assert found.count("decide") == (2 if learned else 1)
    assert len(found) <= most, len(found)


@pytest.mark.parametrize("change", [lambda x: None, scores.alibi], ids=["plain", "alibi"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_pass_is_prepared_once(change, dtype):
    x = torch.rand(2, requires_grad=True)
    mask, given = mask_of(), [each.requires_grad_() for each in tensors(dtype=dtype)]
    with (
        mock.patch.object(prepared_call, "decide", wraps=prepared_call.decide) as decided,
        mock.patch.object(forward_pass, "Forward", wraps=forward_pass.Forward) as made,
    ):
        for _ in range(2):
            out, _ = run(*given, mask, scores=change(x))
            out.sum().backward()
        assert made.call_count == 1
        assert [call.args[0].backward for call in decided.call_args_list] == [True, False]
        with torch.no_grad():
            run(*tensors(dtype=dtype), mask_of(), scores=change(x))
        assert decided.call_count == 3


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **(keywords or {}))


def test_only_plain_calls_in_half_precision_are_cached():
    half, mask = tensors(), mask_of()
    scores = torch.zeros(3, 3)
    dynamic = masks.top_k_blocks(scores, k=2, q_len=TOKENS, block=16)
    assert place_of(*half, mask) is not None and place_of(*half, None, 0.5) is not None
    assert place_of(*tensors(dtype=torch.float32), mask) is None
    assert place_of(*half, mask.with_lengths([30])) is not None
    assert place_of(*half, mask.with_lengths([30, 20])) is None
    assert place_of(*half, dynamic) is not None and place_of(*half, dynamic.with_lengths([30])) is None
    assert place_of(*half, mask, torch.tensor(0.5)) is None
    assert place_of(*half, "mask") is None
    assert place_of(half[0], half[1], None, mask) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert place_of(*half, mask) is None
    with Watching():
        assert place_of(*half, mask) is None


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(
    ("to", "text"),
    [
        (torch.Tensor.to_sparse, "must be a dense tensor; got one with the layout torch.sparse_coo"),
        (torch.Tensor.to_sparse_csr, "must be a dense tensor; got one with the layout torch.sparse_csr"),
        (lambda x: torch.nested.nested_tensor(list(x), layout=torch.strided), "must be a plain tensor; got a nested"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse")
def test_tensors_without_strides_or_memory_go_on_to_the_checks(number, to, text):
    given = tensors()
    given[number] = to(given[number])
    for mask in (None, mask_of(), mask_of().with_lengths([30])):
        assert place_of(*given, mask) is None
        with pytest.raises(TypeError, match=re.escape(f"{'qkv'[number]} {text}")):
            run(*given, mask)


def test_lengths_with_a_number_for_queries_go_on_to_the_checks():
    _, k, v = tensors()
    with pytest.raises(ValueError, match=r"q must have shape \[batch, heads, tokens, head dim\]; got \[\]"):
        run(torch.tensor(0.5, dtype=torch.float16), k, v, mask_of().with_lengths([30]))


@pytest.mark.parametrize("number", range(3))
def test_packed_tokens_of_a_sparse_layout_are_refused(number):
    given = [x[0].transpose(0, 1) for x in tensors()]
    given[number] = given[number].to_sparse()
    with pytest.raises(TypeError, match=f"{'qkv'[number]} must be a dense tensor; got one with the layout"):
        attention_varlen(*given, [0, 10, TOKENS], backend="triton")


def test_a_call_that_drops_or_asks_for_another_backend_is_no_repeat():
    mask = mask_of()
    q, k, v = tensors()
    run(q, k, v, mask)
    with counted() as checks:
        dropped = attention(q, k, v, mask, backend="triton", dropout_p=0.5, seed=1)
        assert checks.call_count == 1
        assert not torch.equal(dropped, attention(q, k, v, mask, backend="triton"))
        assert checks.call_count == 1
        for backend in ("blockwise", None):
            with mock.patch.object(blockwise, "attention", wraps=blockwise.attention) as called:
                attention(q, k, v, mask, backend=backend)
            assert called.call_count == 1


def gradients(q, k, v, mask, dout, dlse=None):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = run(q, k, v, mask)
    outputs, given = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    return torch.autograd.grad(outputs, (q, k, v), given)


@pytest.mark.parametrize("masked", [True, False])
def test_training_calls_are_repeated_too_whatever_the_layout_of_the_gradient(masked):
    mask = mask_of() if masked else None
    q, k, v = tensors()
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(1, 2, TOKENS, 16, generator=generator).half()
    dlse = torch.randn(1, 2, TOKENS, generator=generator)
    inside = dout.transpose(1, 2).contiguous().transpose(1, 2)
    one = torch.ones((), dtype=torch.float16).expand_as(dout)
    given = [(dout,), (inside,), (one,), (dout, dlse), (dout, dlse.transpose(1, 2).contiguous().transpose(1, 2))]
    with mock.patch.object(call_cache, "place_of", return_value=None):
        expected = [gradients(q, k, v, mask, *each) for each in given]
    gradients(q, k, v, mask, dout)
    with counted() as checks:
        for each, want in zip(given * 2, expected * 2, strict=True):
            got = gradients(q, k, v, mask, *each)
            assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(got, want, strict=True))
    assert checks.call_count == 0


def test_a_repeated_backward_is_short():
    q, k, v = (x.requires_grad_() for x in tensors())
    mask, dout = mask_of(), torch.ones(1, 2, TOKENS, 16, dtype=torch.float16)

    def both():
        with torch.autograd.set_multithreading_enabled(False):  # otherwise another thread runs it, unseen
            torch.autograd.grad(attention(q, k, v, mask, backend="triton"), (q, k, v), dout)

    found = functions_of(both)
    found = found[found.index("backward") :]
    assert found.count("started") == 1 and len(found) <= 15, found


def test_a_repeated_backward_is_only_for_plain_gradients_of_plain_tensors():
    mask, (q, k, v) = mask_of(), tensors()
    dout = torch.randn(1, 2, TOKENS, 16, generator=torch.Generator().manual_seed(1)).half()
    want = [gradients(q, k, v, mask, x) for x in (dout, 2 * dout)]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    several = torch.stack([dout, 2 * dout])
    got = torch.autograd.grad(run(*leaves, mask)[0], leaves, several, is_grads_batched=True)
    for each, *of_gradients in zip(got, *want, strict=True):
        torch.testing.assert_close(each, torch.stack(of_gradients), rtol=2e-3, atol=2e-3)

    class Marked(torch.Tensor):
        pass

    marked = torch.autograd.grad(run(*leaves, mask)[0], leaves, dout.as_subclass(Marked))
    assert all(torch.equal(a.as_subclass(torch.Tensor), b) for a, b in zip(marked, want[0], strict=True))

    def unpack(x):  # in another layout
        return x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim == 4 else x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        out, _ = run(*leaves, mask)
    got = torch.autograd.grad(out, leaves, dout)
    assert all(torch.equal(a, b) for a, b in zip(got, want[0], strict=True))
    out, _ = run(*leaves, mask)
    (first, *_) = torch.autograd.grad(out, leaves, dout, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match="gradients of"):
        torch.autograd.grad(first.sum(), leaves)


@pytest.mark.parametrize("change", [None, scores.alibi(torch.ones(2))], ids=["plain", "alibi"])
def test_a_repeat_that_needs_gradients_asks_for_them_before_its_forward(change):
    """Kernels asked for by name may serve the forward alone."""
    mask, (q, k, v) = mask_of(), tensors()
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            run(q, k, v, mask, scores=change)
    refused = mock.patch.object(prepared_call.PreparedCall, "check_gradients", side_effect=ValueError("no backward"))
    with refused, torch.no_grad():
        run(q.requires_grad_(), k, v, mask, scores=change)
    with refused, pytest.raises(ValueError, match="no backward"):
        run(q, k, v, mask, scores=change)


def test_lengths_are_those_of_each_call():
    """Masks that differ only in lengths share a cache."""
    base = mask_of()
    q, k, v = tensors()
    dout = torch.ones(1, 2, TOKENS, 16, dtype=torch.float16)
    run(q, k, v, base.with_lengths([TOKENS]))
    gradients(q, k, v, base.with_lengths([TOKENS]), dout)
    with counted() as checks:
        for length in (33, 7, 0, 40):
            mask = base.with_lengths([length])
            got = (*run(q, k, v, mask), *gradients(q, k, v, mask, dout))
            with mock.patch.object(call_cache, "place_of", return_value=None), mock.patch.object(api, "check"):
                want = (*run(q, k, v, mask), *gradients(q, k, v, mask, dout))
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        separate = base.with_lengths(q_lengths=[20], k_lengths=[30])
        out, _ = run(q, k, v, separate)
        assert not out[:, :, 20:].any() and out[:, :, :20].any()
    assert checks.call_count == 0


def test_a_repeat_is_told_from_a_mistake():
    mask = mask_of()
    q, k, v = tensors()
    run(q, k, v, mask)
    with pytest.raises(ValueError, match="the same heads and tokens"):
        run(q, k, v[:, :, :-1], mask)
    with pytest.raises(TypeError, match="one dtype"):
        run(q, k, v.float(), mask)
    with pytest.raises(ValueError, match="for the lengths of q and k"):
        run(*tensors(tokens=TOKENS + 1), mask)
    with pytest.raises(TypeError, match="v must be a tensor"):
        run(q, k, [v], mask)


def test_empty_tensors_are_not_kept():
    q, k, v = tensors()
    for _ in range(2):
        out, lse = attention(q[:, :, :0], k, v, backend="triton", return_lse=True)
        assert out.shape == (1, 2, 0, 16) and lse.shape == (1, 2, 0)
    assert not call_cache._dense_calls


@pytest.mark.gpu
def test_a_repeat_on_a_gpu_gives_the_same_bits():
    mask = masks.butterfly(256).to("cuda")
    q, k, v = (x.cuda() for x in tensors(tokens=256, dim=64))
    with torch.no_grad():
        first = attention(q, k, v, mask, return_lse=True)
        calls, key = call_cache.place_of(q, k, v, mask, None, "", on_gpu_only=True)
        assert key in calls
        again = attention(q, k, v, mask, return_lse=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attention(q, k, v, mask, return_lse=True)
        graph.replay()
    for other in (again, captured):
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_numbers_that_triton_may_specialise_on_have_keys_of_their_own():
    """Whatever tuples they are in; floats have none."""
    different = [
        (), (1,), (2,), (1, 2), ((1,), 2), (1, (2,)), ((1, 2),), ((1,), (2,)), ((), 1), (1, ()), (None,), (1.0,),
    ]  # fmt: skip
    keys = [tuple(_specialised(x)) for x in different]
    assert len(set(keys)) == len(keys)
    assert _specialised((1, (0.5, 2))) == _specialised((1, (0.25, 2)))

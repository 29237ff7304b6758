import warnings
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sparseflash import BlockMask, attention, masks
from sparseflash.backends import blockwise, operators
from sparseflash.backends.triton import api

N, DIM = 48, 16
FEW = 12  # one tile
SOME = 20  # two tiles
BACKENDS = ["blockwise", "triton"]

pytestmark = pytest.mark.usefixtures("small_blocks_of_dense_attention")


def tensors(device="cpu", dtype=torch.float32, kv_heads=2, tokens=N):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 2, tokens, DIM), (2, kv_heads, tokens, DIM), (2, kv_heads, tokens, DIM)]
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


def mask_arguments(mask):
    arrays = mask.indptr, mask.indices, mask.tile, mask.words, mask.pattern, mask.lengths
    return *arrays, mask.block_q, mask.block_k, DIM**-0.5


def padded():
    return masks.local(N, window=20, block=16).with_lengths(torch.tensor([30, N]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("padded", [False, True])
def test_opcheck_passes(backend, padded):
    import sparseflash.backends.triton.api  # noqa: F401 - registers the operators

    mask = masks.causal(FEW, block=16)
    if padded:
        mask = mask.with_lengths(torch.tensor([11, FEW]))
    op = getattr(torch.ops.sparseflash, backend).default
    torch.library.opcheck(op, (*tensors(tokens=FEW), *mask_arguments(mask)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck_passes_without_a_mask_and_with_heads_inside_tokens(backend):
    import sparseflash.backends.triton.api  # noqa: F401 - registers the operators

    op = getattr(torch.ops.sparseflash, backend).default
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors(tokens=FEW))
    torch.library.opcheck(op, (q, k, v, *(None,) * 6, 128, 128, 0.25))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_into_one_graph_and_serves_another_mask_of_the_same_shape_without_compiling_again(backend):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v, mask):
        return attention(q * 2, k, v, mask, backend=backend).sin()

    torch.compiler.reset()
    compiled = torch.compile(step, backend=count, fullgraph=True)
    q, k, v = (x.detach() for x in tensors())
    shapes = set()
    for mask in (
        masks.causal(N, block=16),
        masks.local(N, window=9, block=16),
        masks.butterfly(N, block=16, factors=1),
    ):
        shapes.add((len(mask.indices), len(mask.bits)))
        torch.testing.assert_close(compiled(q, k, v, mask), step(q, k, v, mask), rtol=0, atol=0)
    assert len(shapes) == 3, "the masks must differ in what they store for this test to mean anything"
    assert len(graphs) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_pass_through_torch_compile(backend):
    torch.compiler.reset()
    mask = padded()

    def loss(q, k, v):
        out, lse = attention(q, k, v, mask, return_lse=True, backend=backend)
        return out.square().sum() + lse[:, :, :8].sum()

    inputs = tensors()
    want = torch.autograd.grad(loss(*inputs), inputs)
    got = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*inputs), inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
def test_autocast_casts_the_inputs_and_the_gradients_back(backend):
    inputs = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attention(*inputs, masks.causal(N, block=16), return_lse=True, backend=backend)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    plain = attention(*(x.bfloat16() for x in inputs), masks.causal(N, block=16), backend=backend)
    torch.testing.assert_close(out, plain, rtol=0, atol=0)
    for gradient in torch.autograd.grad(out.float().sum(), inputs):
        assert gradient.dtype == torch.float32


def test_autocast_reconciles_mixed_dtypes_and_leaves_double_precision():
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, k.bfloat16(), v).dtype == torch.bfloat16
        assert attention(q.double(), k.double(), v.double()).dtype == torch.float64


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_through_lse_alone(backend):
    inputs = tensors()
    mask = masks.causal(N, block=16)
    got, want = (
        torch.autograd.grad(
            attention(*inputs, mask, return_lse=True, backend=b)[1].sum(), inputs, materialize_grads=True
        )
        for b in (backend, "reference")
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dim", [16, 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_dies_with_its_mask_without_the_garbage_collector(backend, dtype, dim, training):
    import gc
    import weakref

    mask = BlockMask.from_dense(torch.ones(FEW, FEW, dtype=torch.bool).tril(), block=16)
    q, k, v = (torch.randn(1, 2, FEW, dim).to(dtype).requires_grad_(training) for _ in range(3))
    alive = [weakref.ref(x) for x in (mask.indices, mask.tile, mask.words)]
    gc.disable()
    try:
        for used in (mask, mask.with_lengths([FEW - 3])):
            for _ in range(2):
                out = attention(q, k, v, used, backend=backend)
                if training:
                    out.sum().backward()
        del mask, used, out
        assert [x() for x in alive] == [None] * 3
    finally:
        gc.enable()


# ---------------------------------------------------------------------- past the dispatcher


def test_whoever_watches_sees_the_operator():
    q, k, v = (x.detach() for x in tensors())
    asked = []

    def ask(q, k, v):
        asked.append(operators.is_plain_call(q, k, v))
        return q

    class Subclass(torch.Tensor):
        pass

    with torch.overrides.BaseTorchFunctionMode():
        ask(q, k, v)
    with FakeTensorMode() as fake:
        ask(*map(fake.from_tensor, (q, k, v)))
    with torch.profiler.profile():
        ask(q, k, v)
    torch.func.vmap(ask)(*(x[None] for x in (q, k, v)))
    torch.func.jvp(ask, (q, k, v), (q, k, v))
    torch.jit.trace(ask, (q, k, v), check_trace=False)
    ask(*(x.as_subclass(Subclass) for x in (q, k, v)))
    ask(*(x.to("meta") for x in (q, k, v)))
    assert len(asked) >= 8 and not any(asked)


def dual(x, tangent):
    return torch.autograd.forward_ad.make_dual(x, tangent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_mode_derivatives_are_refused_and_not_taken_for_zero(backend, dtype):
    q, k, v = (x.detach() for x in tensors(dtype=dtype, tokens=FEW))
    mask = masks.causal(FEW, block=16)

    def run(x):
        return attention(x, k, v, mask, backend=backend)

    for _ in range(2):
        run(q)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        run(dual(q, torch.ones_like(q)))
    with pytest.raises(NotImplementedError, match=f"jvp, jacfwd.*{backend}"):
        torch.func.jvp(run, (q,), (torch.ones_like(q),))
    with pytest.raises(NotImplementedError, match="backend='reference'"):
        torch.func.jacfwd(lambda s: run(q * s))(torch.ones((), dtype=dtype))
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(run(q), attention(q, k, v, mask, backend=backend))  # needs no tangent


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_code_does_not_take_a_tangent_of_an_incoming_gradient_for_zero(backend):
    inputs = tensors(tokens=FEW)
    torch.compiler.reset()
    compiled = torch.compile(attention, backend="aot_eager")
    out = compiled(*inputs, masks.causal(FEW, block=16), backend=backend)
    ones = torch.ones_like(out)
    refused = pytest.raises(NotImplementedError, match=f"forward-mode derivatives .* the {backend} backend")
    with torch.autograd.forward_ad.dual_level(), refused:
        torch.autograd.grad(out, inputs, dual(ones, ones))


def transformed(run):
    def total(x):
        return run(x).sum()

    def of_each(x):
        return torch.vmap(run)(x[None]).sum()

    def compiled(function):
        torch.compiler.reset()
        return torch.compile(function, backend="aot_eager", fullgraph=True)

    return {
        "grad": lambda x: torch.func.grad(total)(x),
        "grad of vmap": lambda x: torch.func.grad(of_each)(x),
        "vmap of grad": lambda x: torch.vmap(torch.func.grad(total))(x[None]),
        "grad of functionalize": lambda x: torch.func.grad(torch.func.functionalize(total))(x),
        "jvp": lambda x: torch.func.jvp(run, (x,), (x,)),
        "jvp of vmap": lambda x: torch.func.jvp(of_each, (x,), (x,)),
        "vmap of jvp": lambda x: torch.vmap(lambda y: torch.func.jvp(run, (y,), (y,))[1])(x[None]),
        "compiled grad": lambda x: compiled(lambda y: torch.func.grad(total)(y))(x),
        "compiled jvp": lambda x: compiled(lambda y: torch.func.jvp(run, (y,), (y,))[1])(x),
    }


@pytest.mark.parametrize("name", transformed(None))
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_transform_takes_the_derivative_for_zero(backend, name):
    q, k, v = (x.detach() for x in tensors(tokens=FEW))
    mask = masks.causal(FEW, block=16)
    differentiate = transformed(lambda x: attention(x, k, v, mask, backend=backend))[name]
    if name.startswith("compiled"):
        with pytest.raises(Exception):  # noqa: B017 - PyTorch's compiler wraps it as it likes
            differentiate(q)
    else:
        with pytest.raises(NotImplementedError, match="backend='reference' has"):
            differentiate(q)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("batched", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_passes_gradients_on(backend, batched, compiled):
    """The wrapped tensor does not say that it requires a gradient."""
    inputs = tensors(tokens=FEW)
    mask = masks.causal(FEW, block=16)
    several = [
        torch.stack([x, 2 * x]).detach().requires_grad_() if name in batched else x for name, x in zip("qkv", inputs)
    ]

    def run(q, k, v):
        return q + attention(q, k, v, mask, backend=backend)

    mapped = torch.vmap(run, in_dims=tuple(0 if name in batched else None for name in "qkv"))
    if compiled:
        torch.compiler.reset()
        mapped = torch.compile(mapped, backend="aot_eager", fullgraph=True)
    each = [run(*(x[i] if name in batched else x for name, x in zip("qkv", several))) for i in range(2)]
    wanted = torch.stack(each)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*autograd kernel was not registered")
        out = mapped(*several)
        got = torch.autograd.grad(out.square().sum(), several)
    torch.testing.assert_close(out, wanted)
    for a, b in zip(got, torch.autograd.grad(wanted.square().sum(), several), strict=True):
        torch.testing.assert_close(a, b)


MAPPED = {
    "padded": (masks.causal(SOME, block=16).with_lengths(torch.tensor([SOME, 9])), {}, 1),
    "no mask": (None, {}, 1),
    "own patterns": (masks.per_batch([masks.causal(SOME, block=16), masks.dense(SOME, block=16)]), {}, 3),
    "dropout": (None, {"dropout_p": 0.5, "seed": 7}, 3),
}


@pytest.mark.parametrize(("mask", "others", "calls"), MAPPED.values(), ids=MAPPED)
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (2, None, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_gives_each_what_it_has_alone_in_one_call_where_it_can(backend, in_dims, mask, others, calls):
    inputs = [x.detach() for x in tensors(tokens=SOME)]
    given = [x if dim is None else torch.stack([x, 2 * x, -x], dim) for x, dim in zip(inputs, in_dims)]

    def run(q, k, v):
        return attention(q, k, v, mask, return_lse=True, backend=backend, **others)

    operator = {"blockwise": blockwise.attention, "triton": api.attention}[backend]
    with mock.patch.object(operator, "forward", wraps=operator.forward) as forward:
        got = torch.vmap(run, in_dims)(*given)
    assert forward.call_count == calls
    for i in range(3):
        alone = run(*(x if dim is None else x.select(dim, i) for x, dim in zip(given, in_dims)))
        assert all(torch.equal(x[i], y) for x, y in zip(got, alone, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_gradients_at_once_are_those_one_by_one(backend):
    """As in `jacobian(vectorize=True)`, whose batched gradients look like a plain tensor."""
    inputs = tensors(tokens=FEW)
    out, lse = attention(*inputs, masks.causal(FEW, block=16), return_lse=True, backend=backend)
    generator = torch.Generator().manual_seed(1)
    several = [torch.randn(2, *x.shape, generator=generator) for x in (out, lse)]
    for results, given in (((out, lse), several), ((out,), several[:1]), ((lse,), several[1:])):
        wanted = {"retain_graph": True, "materialize_grads": True}
        each = [torch.autograd.grad(results, inputs, pair, **wanted) for pair in zip(*given)]
        got = torch.autograd.grad(results, inputs, given, is_grads_batched=True, **wanted)
        assert all(torch.equal(a, torch.stack(b)) for a, b in zip(got, zip(*each), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_made_in_inference_mode_can_be_trained_with(backend):
    q, k, v = tensors(tokens=SOME, dtype=torch.float16)
    want = attention(q, k, v, masks.causal(SOME, block=16), backend=backend)
    with torch.inference_mode():
        mask = masks.causal(SOME, block=16)
        chosen = masks.top_k_blocks(torch.ones(2, 2), k=2, q_len=SOME, block=16, causal=True)
        attention(q, k, v, chosen, backend=backend)
    again = masks.top_k_blocks(torch.ones(2, 2), k=2, q_len=SOME, block=16, causal=True)
    expected = torch.autograd.grad(want.sum(), (q, k, v))
    for each in (mask, chosen, again, chosen.canonical()):
        out = attention(q, k, v, each, backend=backend)
        assert torch.equal(out, want)
        for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_and_seeds_made_in_inference_mode_can_be_trained_with(backend):
    inputs = tensors(tokens=FEW)
    mask = masks.causal(FEW, block=16)
    lengths, seed = torch.tensor([9, FEW]), torch.tensor(3)
    with torch.inference_mode():
        made = mask.with_lengths(lengths.clone()), seed.clone()
    results = []
    for padded, number in (made, (mask.with_lengths(lengths), seed)):
        out = attention(*inputs, padded, dropout_p=0.5, seed=number, backend=backend)
        results.append((out, *torch.autograd.grad(out.sum(), inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_hooks_bring_back_may_lie_at_any_address(dtype):
    """Kernels are compiled for lse and saved maxima at multiples of 16 bytes."""

    def away(x):
        if x.numel() == 0:
            return x
        return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)

    from sparseflash.backends.triton import launcher

    q, k, v = tensors(dtype=dtype, tokens=FEW)
    mask = masks.causal(FEW, block=16)
    want = torch.autograd.grad(attention(q, k, v, mask, backend="triton").sum(), (q, k, v))
    handed = []
    call = launcher.BoundLaunch.__call__

    def noted(self, given):
        handed.append(self.launch.pick(given))
        call(self, given)

    with (
        torch.autograd.graph.saved_tensors_hooks(away, lambda x: x),
        mock.patch.object(launcher.BoundLaunch, "__call__", noted),
    ):
        got = torch.autograd.grad(attention(q, k, v, mask, backend="triton").sum(), (q, k, v))
    assert len(handed) == (3 if dtype == torch.float16 else 4)
    assert all(x.data_ptr() % 16 == 0 for given in handed for x in given if isinstance(x, torch.Tensor))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_hooks_bring_back_may_have_other_strides(dtype, backend):
    """As `torch.autograd.graph.save_on_cpu` does: a copy there is contiguous."""
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors(dtype=dtype))
    mask = masks.causal(q.shape[2], block=16)
    want = torch.autograd.grad(attention(q, k, v, mask, backend=backend).sum(), (q, k, v))
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous().clone(), lambda x: x):
            got = torch.autograd.grad(attention(q, k, v, mask, backend=backend).sum(), (q, k, v))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_negative_of_a_tensor_that_is_only_marked_so():
    q, k, v = (x.detach() for x in tensors(tokens=FEW))
    for backend in BACKENDS:
        got = attention(torch._neg_view(q), k, v, backend=backend)
        assert torch.equal(got, attention(-q, k, v, backend=backend))


def test_inductor_leaves_the_operators_out_of_its_cuda_graphs():
    """Plans that a first call makes would lie in the memory of the graph."""
    if not hasattr(torch.Tag, "cudagraph_unsafe"):
        pytest.skip("this PyTorch has no such tag")
    for name in ("triton", "triton_backward"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.sparseflash, name).default.tags


def test_plans_survive_hooks_that_copy_what_is_saved():
    from sparseflash.backends.triton.schedule.plan import Plan

    q, k, v = tensors(tokens=FEW)
    mask = masks.causal(FEW, block=16)
    with (
        torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x),
        mock.patch.object(Plan, "__init__", autospec=True, side_effect=Plan.__init__) as made,
    ):
        for _ in range(2):
            attention(q, k, v, mask, backend="triton").sum().backward()
    assert made.call_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_tensors_that_overlap_themselves(backend):
    base = torch.randn(1, 2, SOME + 31, generator=torch.Generator().manual_seed(0))
    x = base.unfold(-1, 32, 1).requires_grad_()  # strides of the tokens are 1
    assert torch.empty_like(x).stride(-1) != 1
    got = torch.autograd.grad(attention(x, x, x, backend=backend).square().sum(), x)
    want = torch.autograd.grad(attention(x, x, x, backend="reference").square().sum(), x)
    torch.testing.assert_close(got, want)


def test_tokens_too_far_apart_for_the_kernel_are_refused():
    far = torch.zeros(2**23 + 16, dtype=torch.float16).as_strided((1, 1, 2, 16), (0, 0, 2**23, 1))
    near = torch.zeros(1, 1, 2, 16, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"tokens of k must lie less than 8,388,608 elements apart.*contiguous"):
        attention(near, far, near, backend="triton")
    with pytest.raises(ValueError, match="tokens of q"):
        attention(far, near, near, backend="triton")
    alone = far[:, :, :1]
    assert torch.equal(attention(alone, near, near, backend="triton"), torch.zeros(1, 1, 1, 16, dtype=torch.float16))

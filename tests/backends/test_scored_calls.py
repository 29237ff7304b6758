import contextlib
import weakref
from unittest import mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sparseflash import attention, masks, scores
from sparseflash.backends import blockwise, direct, scored_function
from sparseflash.backends.triton import api

N = 12
OPERATORS = {"blockwise": blockwise.attention, "triton": api.attention}
KINDS = ("plain", "alibi", "t5", "softcap", "function")
SCORED = KINDS[1:]

pytestmark = [
    pytest.mark.usefixtures("small_blocks_of_dense_attention"),
    pytest.mark.parametrize("backend", OPERATORS),
]


class Problem:
    def __init__(self, kind, backend):
        generator = torch.Generator().manual_seed(0)
        self.backend, self.mask = backend, masks.causal(N, block=16)
        self.inputs = [torch.randn(1, 2, N, 16, generator=generator).requires_grad_() for _ in range(3)]
        shape = (2, 8) if kind == "t5" else (2,)
        self.learned = torch.nn.Parameter(torch.rand(shape, generator=generator))
        self.changes = {
            "plain": lambda: None,
            "alibi": lambda: scores.alibi(self.learned),
            "t5": lambda: scores.relative(self.learned, scores.t5_buckets(8, 20)),
            "softcap": lambda: scores.softcap(1.5),
            "function": lambda: scores.function(lambda s, b, h, q, k, gain: s * gain[h], self.learned),
        }[kind]()
        self.wanted = [*self.inputs, *([] if kind in ("plain", "softcap") else [self.learned])]

    def run(self, *inputs, **others):
        others = {"dropout_p": 0.3, "seed": 7} | others
        return attention(
            *(inputs or self.inputs), self.mask, scores=self.changes, return_lse=True, backend=self.backend, **others
        )

    def gradients(self, results, **others):
        out, lse = results
        return torch.autograd.grad(out.sin().sum() + lse.sum(), self.wanted, **others)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.add(str(function))
        return function(*arguments, **(keywords or {}))


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def forbidden(*arguments):
    raise AssertionError("a plain call must be direct")


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_call_gives_the_same_bits_past_the_operator(kind, backend):
    problem, operator = Problem(kind, backend), OPERATORS[backend]
    before = "" if kind == "plain" else "_scored"
    with (
        mock.patch.object(operator, f"{before}_forward_op", forbidden),
        mock.patch.object(operator, f"{before}_backward_op", forbidden),
        mock.patch.object(scored_function, "attention", forbidden),
    ):
        plain = problem.run()
        found = problem.gradients(plain)
        with torch.no_grad():
            assert same(problem.run(), plain)
    with Seen() as seen:
        watched = problem.run()
        assert same(watched, plain) and same(problem.gradients(watched), found)
    names = {f"sparseflash.{backend}{before}.default", f"sparseflash.{backend}{before}_backward.default"}
    assert (names <= seen.names) == (kind != "function")


@pytest.mark.parametrize("kind", ["plain", "alibi"])
def test_who_enters_after_the_forward_sees_the_backward(kind, backend):
    problem = Problem(kind, backend)
    found = problem.gradients(problem.run())
    results = problem.run()
    with Seen() as seen:
        assert same(problem.gradients(results), found)
    before = "" if kind == "plain" else "_scored"
    assert f"sparseflash.{backend}{before}_backward.default" in seen.names


def test_parameters_are_plain_and_other_subclasses_are_not(backend):
    class Subclass(torch.Tensor):
        pass

    problem, operator = Problem("alibi", backend), OPERATORS[backend]
    learned = problem.learned.detach()
    assert direct.is_plain_call(torch.nn.Parameter(learned))
    assert not direct.is_plain_call(learned.as_subclass(Subclass))
    assert not direct.is_plain_call(torch.nn.Parameter(learned.as_subclass(Subclass)))
    problem.changes = scores.alibi(learned.as_subclass(Subclass))
    with mock.patch.object(operator, "_scored_forward_op", wraps=operator._scored_forward_op) as called:
        problem.run()
    assert called.call_count == 1


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients_are_refused(kind, watched, backend):
    problem = Problem(kind, backend)
    expected = problem.gradients(problem.run())
    if watched:
        with Seen():
            results = problem.run()
    else:
        results = problem.run()
    first = problem.gradients(results, create_graph=True)
    assert same(first, expected)
    text = f"^gradients of gradients are not implemented by the {backend} backend; backend='reference' has them.$"
    for gradient in first:
        with pytest.raises(NotImplementedError, match=text):
            torch.autograd.grad(gradient.sum(), problem.wanted, allow_unused=True, retain_graph=True)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_recomputes_the_same_gradients(kind, backend):
    problem = Problem(kind, backend)
    want = problem.gradients(problem.run())
    assert same(problem.gradients(checkpoint(problem.run, *problem.inputs, use_reentrant=False)), want)
    both = problem.run(), checkpoint(problem.run, *problem.inputs, use_reentrant=False)
    of_lse = [torch.autograd.grad(lse.sum(), problem.wanted, materialize_grads=True) for _, lse in both]
    assert same(*of_lse)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_unpacked_once_and_only_saved_for_a_backward(kind, backend):
    problem, packed, unpacked = Problem(kind, backend), [], []

    def pack(x):
        packed.append(x)
        return len(packed) - 1

    def unpack(number):
        unpacked.append(number)
        return packed[number].clone()

    want = problem.gradients(problem.run())
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        with torch.no_grad():
            assert problem.run()[0].grad_fn is None
        assert not packed
        out, lse = problem.run()
    saved = len(packed)
    got = torch.autograd.grad((out, lse), problem.wanted, (out.detach().cos(), torch.ones_like(lse)))
    assert same(got, want) and sorted(unpacked) == list(range(saved))


def test_the_graph_holds_tensors_only_where_hooks_reach_them(backend):
    problem = Problem("softcap", backend)
    bias = torch.randn(1, 2, N, N, requires_grad=True)
    made = bias * 1
    problem.changes, alive = scores.bias(made), weakref.ref(made)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        results = problem.run()
    del made
    problem.changes = None
    assert alive() is None
    assert torch.autograd.grad(results[0].sum(), bias)[0].any()


def test_only_gradients_that_are_wanted_are_computed(backend):
    operator, problem = OPERATORS[backend], Problem("alibi", backend)
    pair = torch.randn(1, 2, N, N)
    problem.changes = problem.changes + scores.bias(pair)
    asked, given = [], []

    def backward(dout, dlse, saved, problem, changes, wanted):
        asked.append(wanted)
        dq, dk, dv, learned = operate(dout, dlse, saved, problem, changes, wanted)
        given.append([x is not None for x in learned])
        return dq, dk, dv, learned

    operate = operator._compute_backward
    with mock.patch.object(operator, "_compute_backward", backward):
        sum(x.sum() for x in problem.run()).backward()
    assert asked == given == [[True, False]]
    assert problem.learned.grad is not None and pair.grad is None
    for x in problem.inputs:
        x.requires_grad_(False)
        x.grad = None
    sum(x.sum() for x in problem.run()).backward()
    assert all(x.grad is None for x in problem.inputs)


@pytest.mark.parametrize("kind", ["plain", "alibi"])
def test_a_seed_that_is_written_to_before_the_backward_is_noticed(kind, backend):
    problem, seed = Problem(kind, backend), torch.tensor([1])
    results = problem.run(seed=seed)
    seed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        problem.gradients(results)


@pytest.mark.parametrize("kind", KINDS)
def test_functional_gradients_and_tangents_are_refused_in_our_words(kind, backend):
    problem = Problem(kind, backend)
    q, *others = (x.detach() for x in problem.inputs)
    with pytest.raises(NotImplementedError, match=r"torch\.func\.grad .* not implemented by the"):
        torch.func.grad(lambda x: problem.run(x, *others)[0].sum())(q)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        problem.run(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)), *others)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_code_that_was_compiled_before_does_not_take_a_tangent_for_zero(kind, compiler, backend):
    problem = Problem(kind, backend)
    q, *others = (x.detach() for x in problem.inputs)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x + problem.run(x, *others)[0], backend=compiler)
    assert torch.equal(compiled(q), q + problem.run(q, *others)[0])
    with torch.autograd.forward_ad.dual_level(), pytest.raises(Exception, match=r"forward-mode derivatives \(jvp"):
        compiled(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", ["alibi", "t5", "function"])
def test_compiled_code_does_not_take_a_tangent_of_a_learned_tensor_for_zero(kind, compiler, backend):
    changes = {
        "alibi": scores.alibi,
        "t5": lambda table: scores.relative(table, scores.t5_buckets(8, 20)),
        "function": lambda gains: scores.function(lambda s, b, h, q, k, gain: s * gain[h], gains),
    }[kind]
    problem = Problem(kind, backend)
    inputs, learned = [x.detach() for x in problem.inputs], problem.learned.detach()

    def run(learned):
        return learned.sum() + attention(*inputs, problem.mask, scores=changes(learned), backend=backend)

    torch.compiler.reset()
    compiled = torch.compile(run, backend=compiler)
    assert torch.equal(compiled(learned), run(learned))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(Exception, match=r"forward-mode derivatives \(jvp"):
        compiled(torch.autograd.forward_ad.make_dual(learned, torch.ones_like(learned)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tangent_of_an_incoming_gradient_is_refused_and_not_taken_for_zero(kind, backend):
    problem = Problem(kind, backend)
    out, _ = problem.run()
    with torch.autograd.forward_ad.dual_level():
        dout = torch.autograd.forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match=f"forward-mode derivatives .* the {backend} backend"):
            torch.autograd.grad(out, problem.wanted, dout, retain_graph=True)
        found = torch.autograd.grad(out, problem.wanted, torch.ones_like(out), retain_graph=True)
    assert same(found, torch.autograd.grad(out, problem.wanted, torch.ones_like(out)))


@pytest.mark.parametrize("kind", SCORED)
def test_several_gradients_at_once_are_refused_in_our_words(kind, backend):
    problem = Problem(kind, backend)
    out, lse = problem.run()
    for x in (out, lse):
        with pytest.raises(NotImplementedError, match=f"is_grads_batched=True.* not .* by the {backend} backend where"):
            torch.autograd.grad(x, problem.wanted, torch.ones(2, *x.shape), is_grads_batched=True, retain_graph=True)


@pytest.mark.parametrize("kind", SCORED)
def test_vmap_is_refused_in_our_words(kind, backend):
    problem = Problem(kind, backend)
    q, *others = (x.detach() for x in problem.inputs)
    refused = pytest.raises(NotImplementedError, match=r"torch\.vmap over an attention whose scores are changed")
    with refused:
        torch.vmap(lambda x: problem.run(x, *others)[0])(torch.stack([q, q]))
    with refused if kind == "function" else contextlib.nullcontext():
        found = torch.vmap(lambda x: x * problem.run(q, *others)[0])(torch.ones(2))
        assert torch.equal(found[1], problem.run(q, *others)[0])


def test_compiled_code_leaves_a_function_out_of_its_graphs(backend):
    problem = Problem("function", backend)
    want = problem.run()
    torch.compiler.reset()
    got = torch.compile(problem.run, backend="aot_eager")(*problem.inputs)
    for one, other in zip((*got, *problem.gradients(got)), (*want, *problem.gradients(want)), strict=True):
        torch.testing.assert_close(one, other)


def test_one_whole_graph_of_a_function_is_refused_in_our_words_and_made_of_the_reference(backend):
    problem = Problem("function", backend)
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"Compile without fullgraph=True, .* or backend='reference', which is traced"):
        torch.compile(problem.run, backend="eager", fullgraph=True)()
    problem.backend = "reference"
    torch.testing.assert_close(torch.compile(problem.run, backend="eager", fullgraph=True)(), problem.run())


class Layer(torch.nn.Module):
    def __init__(self, problem):
        super().__init__()
        self.problem, self.learned = problem, problem.learned

    def forward(self, *inputs):
        return self.problem.run(*inputs)[0]


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_an_exported_program_holds_the_attention(kind, backend):
    layer = Layer(Problem(kind, backend))
    q, k, v = (x.detach() for x in layer.problem.inputs)
    torch.testing.assert_close(torch.export.export(layer, (q, k, v)).module()(k, v, q), layer(k, v, q))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    "record",
    [
        torch.export.export, torch.jit.trace, lambda layer, inputs: make_fx(layer)(*inputs),
        lambda layer, inputs: torch.func.functionalize(layer)(*inputs),
    ],
)  # fmt: skip
def test_a_function_is_refused_by_what_records_operations(record, backend):
    layer = Layer(Problem("function", backend))
    with pytest.raises(NotImplementedError, match=rf"cannot record scores\.function with the {backend} backend"):
        record(layer, tuple(x.detach() for x in layer.problem.inputs))

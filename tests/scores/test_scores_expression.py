import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import attention, scores
from sparseflash.scores.expression import derivatives
from sparseflash.scores.operators import FILLED, RECORDED, SAME
from sparseflash.scores.tracing import recorded
from tests.drawn.counts import examples_times

CPU = torch.device("cpu")
SIZES = 2, 3, 6, 8
PLACES = [torch.arange(n).view(-1, *(1,) * (3 - axis)) for axis, n in enumerate(SIZES)]

UNARY = {
    "neg": lambda x: -x, "abs": torch.abs, "exp": lambda x: (-x.abs()).exp(), "exp2": lambda x: torch.exp2(-x * x),
    "log": lambda x: (1.5 + x * x).log(), "log1p": lambda x: x.square().log1p(), "log2": lambda x: (2 + x * x).log2(),
    "sqrt": lambda x: (1 + x * x).sqrt(), "rsqrt": lambda x: (1 + x * x).rsqrt(), "sin": torch.sin, "cos": torch.cos,
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu, "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus, "erf": torch.erf, "gelu": torch.nn.functional.gelu,
    "fast gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "floor": torch.floor, "ceil": torch.ceil, "sign": torch.sign,
    "cube": lambda x: x**3, "inverse": lambda x: (2 + x * x) ** -2, "power": lambda x: (1 + x * x) ** 1.3,
    "root": lambda x: (1 + x * x) ** 0.5, "reciprocal": lambda x: (1 + x * x).reciprocal(),
    "clamp": lambda x: x.clamp(-0.7, 0.9), "least": lambda x: x.clamp(min=0.1), "most": lambda x: x.clamp(max=0.1),
    "fill": lambda x: x.masked_fill(x > 0.4, 2.0), "remainder": lambda x: x % 0.75,
    # Not float(): an expression has one kind of number with a fraction.
    "round": lambda x: x.int().to(x.dtype),
    "straight through": lambda x: x + (x.tanh() - x).detach(),
    "from number": lambda x: 2 - x, "over": lambda x: x / 3, "under": lambda x: 1 / (x * x + 2),
    "constant": lambda x: x + torch.tensor(0.5) + torch.ones_like(x), "copy": lambda x: x.clone().to(x.dtype),
}  # fmt: skip
BINARY = {
    "add": torch.add, "sub": lambda x, y: torch.sub(x, y, alpha=2), "mul": torch.mul,
    "div": lambda x, y: x / (1 + y * y), "min": torch.minimum, "max": torch.maximum,
    "where": lambda x, y: torch.where((x > y) & (y > 0) | ~(x <= 1), x, y), "mod": lambda x, y: x % (1 + y * y),
}  # fmt: skip
OF_PLACES = {
    "distance": lambda b, h, q, k: (q - k).abs() * 0.125, "float": lambda b, h, q, k: (q - k).float() / 4,
    "parity": lambda b, h, q, k: (q // 3 + k) % 2,
    "group": lambda b, h, q, k: (k - q - 5) // 4 / 4, "equal": lambda b, h, q, k: (q % 3 == k % 3) ^ (b != 1),
    "head": lambda b, h, q, k: torch.logical_or(h == 1, torch.logical_not(q > k)),
}  # fmt: skip


def function_of(first, second, third, one, two, place):
    def function(score, b, h, q, k, gain, table):
        x = BINARY[one](UNARY[first](score) * gain[h], OF_PLACES[place](b, h, q, k) + 0 * score)
        y = UNARY[second](score + table[b, (k - q).clamp(-4, 4) + 4, h])
        return BINARY[two](x, UNARY[third](y)) + 0.0 * score

    function.__name__ = "-".join((first, second, third, one, two, place))
    return function


@st.composite
def functions(draw):
    unary, binary = st.sampled_from(sorted(UNARY)), st.sampled_from(sorted(BINARY))
    place = draw(st.sampled_from(sorted(OF_PLACES)))
    return function_of(draw(unary), draw(unary), draw(unary), draw(binary), draw(binary), place)


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in (SIZES, (3,), (2, 9, 3))]


@given(function=functions())
@example(function=function_of("abs", "round", "power", "add", "add", "distance"))
@examples_times(2)
def test_an_expression_and_its_derivatives_are_those_of_the_function(function):
    score, gain, table = (x.requires_grad_() for x in inputs())
    wanted = function(score, *PLACES, gain, table)
    found = recorded(function, (gain, table), CPU)
    made = found.expression
    loads = [at for at in sorted(made.reads(found.output)) if made.nodes[at].op == "load"]
    by = derivatives(made, found.output, [made.score, *loads])
    with torch.no_grad():
        got, *slopes = made.evaluated([found.output, *by], [score, *PLACES], (gain, table))
    torch.testing.assert_close(got, wanted)
    by_autograd = torch.autograd.grad(wanted.sum(), (score, gain, table), allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(slopes[0].expand(SIZES).to(score.dtype), by_autograd[0])
    sums = [torch.zeros_like(x) for x in (gain, table)]
    for at, slope in zip(loads, slopes[1:]):
        node = made.nodes[at]
        indices = made.evaluated(node.inputs, [score, *PLACES], (gain, table))
        indices = tuple(each.expand(SIZES) for each in indices)
        sums[node.value].index_put_(indices, slope.to(score.dtype).expand(SIZES), accumulate=True)
    for one, other in zip(sums, by_autograd[1:]):
        torch.testing.assert_close(one, other.detach())


POWERS = [0, 0.0, 1, 2, 3, 7, 16, 17, 40, 0.5, 1.5, 1.3, 0.1, 2.5, 20.25, -1, -2, -3, -18, -0.5, -1.5, -0.3, -2.7]


@pytest.mark.parametrize("exponent", POWERS)
def test_powers_and_their_derivatives_are_pytorchs(exponent):
    bases = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.3, -0.3, 1.7, -1.7, 3.0, torch.inf, torch.nan], dtype=torch.float64)
    found = recorded(lambda s, b, h, q, k: s**exponent, (), CPU)
    made = found.expression
    nodes = [found.output, *derivatives(made, found.output, [made.score])]
    got = made.evaluated(nodes, [bases, *PLACES], ())
    leaf = bases.clone().requires_grad_()
    wanted = leaf**exponent
    for one, other in zip(got, (wanted.detach(), *torch.autograd.grad(wanted.sum(), leaf)), strict=True):
        torch.testing.assert_close(one.to(bases.dtype).expand(bases.shape), other, equal_nan=True)


def test_powers_of_integers_are_integers():
    function = lambda s, b, h, q, k: s + (q - k) ** 3 // 2 + (q - k) ** 1.0 + (q == k) ** 2  # noqa: E731
    score = inputs()[0]
    found = recorded(function, (), CPU)
    (got,) = found.expression.evaluated([found.output], [score, *PLACES], ())
    torch.testing.assert_close(got, function(score, *PLACES))


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k, x: s * ((q == k) + (q == 0)),
        lambda s, b, h, q, k, x: torch.where(~((q == k) * (h == 0)), s, 2 * s),
        lambda s, b, h, q, k, x: torch.where(torch.ones_like(q, dtype=torch.bool) & (q > k), s, 2 * s),
        lambda s, b, h, q, k, x: s + x[torch.sign(q - k) + 1] + x[torch.zeros_like(q)],
        lambda s, b, h, q, k, x: s + x[torch.full_like(h, 2)],
    ],
)
def test_results_have_the_kinds_of_pytorchs(function):
    score, x = inputs()[:2]
    found = recorded(function, (x,), CPU)
    (got,) = found.expression.evaluated([found.output], [score, *PLACES], found.tensors)
    torch.testing.assert_close(got, function(score, *PLACES, x))


@pytest.mark.parametrize("around", [torch.inference_mode, torch.enable_grad, lambda: torch.autocast("cpu")])
def test_functions_are_recorded_alike_in_any_mode(around):
    gain, table = inputs()[1:]
    for name in UNARY:
        for place in OF_PLACES:
            function = function_of(name, name, name, "where", "div", place)
            want = recorded(function, (gain, table), CPU).expression
            with around():
                assert repr(recorded(function, (gain, table), CPU).expression.nodes) == repr(want.nodes)


def test_numbers_of_captured_tensors_are_those_of_the_recording():
    layer, scale, other = torch.tensor(1), torch.tensor(0.25), torch.tensor([1.0, 2.0, 4.0])
    tables = torch.arange(6.0).view(2, 3)

    def function(s, b, h, q, k):
        twice = 2 if torch.equal(other, other) else 1
        return s * float(scale) + tables[layer, h] + CAPTURED[torch.tensor(2)] * other.tolist()[2] * twice

    score = inputs()[0]
    found = recorded(function, (), CPU)
    (got,) = found.expression.evaluated([found.output], [score, *PLACES], found.tensors)
    torch.testing.assert_close(got.to(score.dtype), function(score, *PLACES))


def test_what_the_result_does_not_need_may_be_anything():
    found = recorded(lambda s, b, h, q, k: (s.sum(), s.softmax(-1), s * 2)[-1], (), CPU)
    assert found.expression.nodes[found.output].op == "mul"


def test_equal_operations_are_recorded_once_and_constants_computed():
    made = recorded(lambda s, b, h, q, k: (s * 2 + 1) * (s * 2 + 1) + torch.tensor(2.0) * 3, (), CPU).expression
    assert [node.op for node in made.nodes].count("mul") == 2
    assert any(node.value == 6.0 for node in made.nodes)


CAPTURED = torch.ones(3)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda s, b, h, q, k, g: s - s.sum(-1, keepdim=True), "got sum, which is none of them"),
        (lambda s, b, h, q, k, g: s * g.exp()[h], "an operation on all of a tensor of shape [3]"),
        (lambda s, b, h, q, k, g: s * CAPTURED.sum(), "got sum"),
        (lambda s, b, h, q, k, g: s * g[0] + torch.cumsum(s, -1), "got cumsum"),
        (lambda s, b, h, q, k, g: (g[h] * 1.0).view(1, 1), "a result that is not one score, a scalar tensor"),
        (lambda s, b, h, q, k, g: s if q > 3 else -s, "as by item(), if or an index, in place of torch.where."),
        (lambda s, b, h, q, k, g: s.half().float(), "a conversion to torch.float16"),
        (lambda s, b, h, q, k, g: s * g[1:][0], "a slice of a tensor"),
        (lambda s, b, h, q, k, g: s * 2.0**s + s ** (s * s), "a power whose exponent is no number"),
        (lambda s, b, h, q, k, g: s**torch.inf, "a power whose exponent is inf, which must be finite"),
        (lambda s, b, h, q, k, g: s + g[(h > 1).expand(3, 1, 1)[:, 0, 0]].sum(), "got expand"),
        (lambda s, b, h, q, k, g: torch.div(s, 3, rounding_mode="trunc"), "div with rounding_mode='trunc'"),
        (lambda s, b, h, q, k, g: s * torch.tensor([1.0, 2.0])[h], "a tensor made inside the function, of shape [2]"),
        (torch.no_grad()(lambda s, b, h, q, k, g: s * 2), "got torch.no_grad() or the like, in place of detach()"),
        (torch.inference_mode()(lambda s, b, h, q, k, g: s * 2), "got torch.no_grad() or the like, in place of"),
        (lambda s, b, h, q, k, g: (s.view(1)[:1] + s).view(()), "got view, which is none of them. With backend='bl"),
        (lambda s, b, h, q, k, g: s[0] + s, "it raised IndexError: invalid index of a 0-dim tensor"),
        (lambda s, b, h, q, k, g: s * g[0].item(), "a number that is read from a tensor"),
        (lambda s, b, h, q, k, g: s * 2 if CAPTURED[0] > 0 else s, "a number that is read from a tensor"),
        (lambda s, b, h, q, k, g: s * 2 if torch.equal(q, 0 * q) else s, "a number that is read from a tensor"),
        (lambda s, b, h, q, k, g: s * 2 if torch.allclose(g, g + 0) else s, "a number that is read from a tensor"),
        (lambda s, b, h, q, k, g: s + q.nonzero().shape[0], "a number that is read from a tensor"),
        (lambda s, b, h, q, k, g: s + q.tolist()[-1][0], "a number that is read from a tensor"),
        (lambda s, b, h, q, k, g: s * float(g.numpy()[1]), "a number that is read from a tensor"),
        (lambda s, b, h, q, k, g: s.view(-1).mul_(2).view(s.shape), "got mul_, which changes a tensor in place"),
        (lambda s, b, h, q, k, g: s * CAPTURED.zero_()[h], "got zero_, which changes a tensor in place"),
        (lambda s, b, h, q, k, g: s.max(-1, keepdim=True).values + s, "got max, which is none of them"),
        (lambda s, b, h, q, k, g: 2.0, "but float"),
    ],
)
def test_what_is_no_expression_is_refused(function, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        recorded(function, (torch.ones(3),), CPU)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_entries_of_half_precision_are_recorded(dtype):
    """They are read as fp32; only a conversion to half precision is refused."""
    found = recorded(lambda s, b, h, q, k, x: s * x[h] + x[h] * x[k], [torch.randn(3).to(dtype)], CPU)
    assert found.expression.nodes[found.output].op == "add"


def test_a_captured_tensor_is_read_but_must_not_be_learned():
    found = recorded(lambda s, b, h, q, k: s * CAPTURED[h], (), CPU)
    assert found.tensors[0] is CAPTURED
    learned = [torch.ones(3, requires_grad=True)]
    with pytest.raises(ValueError, match="requires gradients, which the function must take as a further argument"):
        recorded(lambda s, b, h, q, k: s * learned[0][h], (), CPU)


@pytest.mark.gpu
def test_a_captured_number_must_lie_on_the_same_device():
    number = torch.tensor(2.0)
    with pytest.raises(ValueError, match="a captured tensor on cpu, which must be on cuda"):
        recorded(lambda s, b, h, q, k: s * number, (), torch.device("cuda"))


def test_products_of_rows_are_sums_with_gradients():
    """As MLA adds its rotary part; a row may be any dimension, and of a half-precision tensor that is converted."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, x, y = (torch.randn(1, 2, 20, n, generator=generator) for n in (16, 16, 16, 5, 5))
    y, weights = y[:, :1].mT.contiguous(), torch.randn(5, generator=generator)

    def rotary(s, b, h, q, k, x, y):
        return s + 0.3 * torch.dot(x[b, h, q].float(), y[b, h // 2, :, k]) + x[b, h, q] @ weights

    found = []
    for backend in ("reference", "triton"):
        leaves = [each.clone().requires_grad_() for each in (q, k, v, x, y)]
        out = attention(*leaves[:3], scores=scores.function(rotary, *leaves[3:]), backend=backend)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_an_entry_may_be_of_a_group_of_heads_and_a_key():
    """Its head is checked as a number, its key is a tile."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 20, 16, generator=generator)
    of_group, of_rows = torch.randn(2, 20, generator=generator), torch.randn(20, 2, 3, generator=generator)
    change = scores.function(lambda s, b, h, q, k: s + of_group[h // 2, k] + of_rows[q, h // 2, 1])
    found, want = (attention(q, k, v, scores=change, backend=backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda s, b, h, q, k, x: s + torch.dot(x[h], x[h] * s), "an operation on all of a tensor of shape [2, 300]"),
        (lambda s, b, h, q, k, x: s + torch.dot(x[h], x[h]), "dot of rows of 300 numbers, of which the kernels take"),
        (lambda s, b, h, q, k, x: s + torch.dot(x[h], torch.ones(300)), "got ones, which is none of them"),
    ],
)
def test_other_products_are_refused(function, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        recorded(function, (torch.ones(2, 300),), CPU)


def test_every_operation_that_is_named_is_one_of_pytorchs():
    names = {*RECORDED, *FILLED, *SAME} - {"and", "or", "xor", "not", *"bhqk"}
    assert "tanh" in names and all(hasattr(torch.ops.aten, name) for name in names)

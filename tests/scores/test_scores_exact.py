import pytest
import torch
from hypothesis import example, given
from torch._subclasses.fake_tensor import FakeTensorMode

from sparseflash import BlockMask, attention, masks, scores
from sparseflash.backends import problem as backends_problem
from tests.compared.scored import ALMOST_ALL_WEIGHT_ON_ONE_KEY, KINDS, Scored, check, results, scored
from tests.drawn.counts import examples_times
from tests.drawn.problems import Problem

HALF = (torch.float16, torch.bfloat16)


@given(scored(most_tokens=100, head_dims=(1, 8, 16), value_dims=(1, 16), blocks=(16, 32),
              dtypes=(torch.float64, torch.float32, *HALF), dropouts=(0.0, 0.0, 0.3)))  # fmt: skip
@example(ALMOST_ALL_WEIGHT_ON_ONE_KEY)
@examples_times(3)
def test_blockwise_is_exact(case):
    check(case, "blockwise")


def test_rounded_weights_do_not_matter_where_all_values_are_equal():
    """No score has a gradient then. The rounding error of a sum of weights must not be multiplied by the weights'
    gradients."""
    generator = torch.Generator().manual_seed(0)
    q, k = (4 * torch.randn(1, 2, 90, 16, generator=generator) for _ in range(2))
    dout = torch.randint(-8, 9, (1, 2, 90, 16), generator=generator).float()
    temperature = (0.5 + torch.rand(1, 2, 90, generator=generator)).requires_grad_()
    errors = {}
    for backend in ("reference", "blockwise"):
        out = attention(q, k, torch.ones_like(k), scores=scores.temperature(temperature), backend=backend)
        (gradient,) = torch.autograd.grad(out, temperature, dout)
        errors[backend] = float(gradient.abs().max())
    assert errors["reference"] > 1e-5
    # An error of the mean is corrected under the same weights: the remaining one is of second order.
    assert errors["blockwise"] < torch.finfo(torch.float32).eps ** 0.5 * errors["reference"]


def plain_problem(seed=0, **changes):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 40, "k_len": 40, "dim": 16, "v_dim": 16}
    others = {"recipe": None, "dtype": torch.float64, "scale": None, "layout": "contiguous", "seed": seed}
    return Problem(**sizes | others | changes)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_differentiable_twice_and_by_numerical_differences(kind):
    case = Scored(plain_problem(batch=1, heads=2, kv_heads=1, q_len=5, k_len=5, dim=2, v_dim=2), (kind,))
    changes, learned = case.changes("cpu", torch.float64)
    q, k, v, *_ = case.problem.tensors()

    def run(q, k, v, *learned):
        changed = changes.with_tensors(rest(changes, learned))
        return attention(q, k, v, case.mask, scores=changed, backend="reference")

    assert torch.autograd.gradcheck(run, (q, k, v, *learned))
    assert torch.autograd.gradgradcheck(run, (q, k, v, *learned))


def rest(changes, learned):
    given = iter(learned)
    return [next(given) if x.requires_grad else x for x in changes.tensors()]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_the_same_bits_every_time(kind):
    case = Scored(plain_problem(dtype=torch.float32, q_len=300, k_len=300), (kind,))
    first, second = results(case, "blockwise"), results(case, "blockwise")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_written_order_does_not_matter_and_the_cap_comes_first():
    q, k, v = (torch.randn(1, 2, 40, 16, dtype=torch.float64) for _ in range(3))
    slopes = torch.tensor([0.5, 2.0], dtype=torch.float64)
    one = attention(q, k, v, scores=scores.alibi(slopes) + scores.softcap(0.5), return_lse=True)[1]
    other = attention(q, k, v, scores=scores.softcap(0.5) + scores.alibi(slopes), return_lse=True)[1]
    assert torch.equal(one, other)
    i = torch.arange(40, dtype=torch.float64)
    raw = q @ k.mT / 4
    by_hand = 0.5 * torch.tanh(raw / 0.5) - slopes.view(2, 1, 1) * (i[:, None] - i).abs()
    torch.testing.assert_close(one, by_hand.logsumexp(-1))


META = {"device": "meta", "requires_grad": True}
ON_META = {
    "alibi": lambda mask: scores.alibi(torch.empty(2, **META)),
    "relative": lambda mask: scores.relative(torch.empty(2, 9, **META), scores.clipped(4)),
    "grid": lambda mask: scores.relative_2d(
        torch.empty(2, 7, 7, **META), 4, 4, cells=torch.empty(32, dtype=torch.int64, device="meta")
    ),
    "key_bias": lambda mask: scores.key_bias(torch.empty(1, 2, 32, **META)),
    "bias": lambda mask: scores.bias(torch.empty(1, 1, 32, 32, **META)),
    "temperature": lambda mask: scores.temperature(torch.empty(2, **META)),
    "tile_bias": lambda mask: scores.tile_bias(torch.empty(1, 1, 3, 16, 16, **META), mask),
    "sink": lambda mask: scores.sink(torch.empty(2, **META)),
    "function": lambda mask: scores.function(lambda score, b, h, q, k, gain: score * gain[h], torch.empty(2, **META)),
}


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize("kind", ON_META)
def test_shapes_come_out_on_the_meta_device(kind, backend):
    q, k, v = (torch.empty(3, 2, 32, 16, **META) for _ in range(3))
    mask = masks.causal(32, block=16).to("meta")
    change = ON_META[kind](mask)
    out = attention(q, k, v, mask, scores=change, backend=backend)
    (learned,) = change.tensors()
    gradients = torch.autograd.grad(out.sum(), (q, learned))
    assert out.is_meta and out.shape == q.shape
    assert [x.shape for x in gradients] == [q.shape, learned.shape]


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
def test_a_function_of_fake_tensors_gives_shapes(backend):
    mask = masks.causal(32, block=16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, gain = (torch.empty(shape, requires_grad=True) for shape in ((3, 2, 32, 16), (2,)))
        change = scores.function(lambda score, b, h, q, k, gain: score * gain[h], gain)
        out = attention(q, q, q, mask, scores=change, backend=backend)
        gradients = torch.autograd.grad(out.sum(), (q, gain))
    assert [x.shape for x in (out, *gradients)] == [q.shape, q.shape, gain.shape]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_biases_of_keys_are_added_without_rounding_their_sum(dtype):
    """A bias that all queries share is first added to the `key_bias`."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 16, generator=generator) for _ in range(3))
    keys, shared = (torch.randn(1, 2, 1, 20, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    leaves = keys, shared
    joined = attention(q, k, v, scores=scores.key_bias(keys[:, :, 0]) + scores.bias(shared))
    want = attention(q, k, v, scores=scores.bias(keys.float() + shared.float()))
    assert torch.equal(joined, want)
    dout = torch.randn(joined.shape, generator=generator)
    for one, other in zip(torch.autograd.grad(joined, leaves, dout), torch.autograd.grad(want, leaves, dout)):
        assert torch.equal(one, other) and one.dtype == dtype


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_a_query_without_keys_gives_zero_and_the_sink_alone(backend):
    mask = BlockMask.from_function(lambda q, k: q % 2 == 0, 20, block=16)
    q, k, v = (torch.randn(1, 2, 20, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    logits = torch.randn(2, dtype=torch.float64, requires_grad=True)
    out, lse = attention(q, k, v, mask, scores=scores.sink(logits), return_lse=True, backend=backend)
    assert (out[:, :, 1::2] == 0).all() and (lse[:, :, 1::2] == logits.view(1, 2, 1)).all()
    found = torch.autograd.grad(out[:, :, 1::2].sum(), (q, logits), retain_graph=True)
    assert all((x == 0).all() for x in found)
    of_q, of_sink = torch.autograd.grad(lse[:, :, 1::2].sum(), (q, logits))
    assert (of_q == 0).all() and (of_sink == 10).all()


def test_grids_and_windows_read_the_entry_of_their_offset():
    table = torch.randn(2, 5, 7, dtype=torch.float64)
    q, k, v = (torch.zeros(1, 2, 24, 4, dtype=torch.float64) for _ in range(3))
    mask = masks.documents([12, 12], causal=False, block=16)
    _, lse = attention(q, k, v, mask, scores=scores.relative_2d(table, 3, 4), return_lse=True)
    y, x = torch.arange(12) // 4, torch.arange(12) % 4
    window = table[:, y[:, None] - y + 2, x[:, None] - x + 3]
    torch.testing.assert_close(lse, window.logsumexp(-1).repeat(1, 2)[None])


def test_three_axes_are_told_apart():
    table = torch.randn(1, 3, 5, 3, dtype=torch.float64)
    q, k, v = (torch.zeros(1, 1, 12, 4, dtype=torch.float64) for _ in range(3))
    _, lse = attention(q, k, v, scores=scores.relative_3d(table, 2, 3, 2), return_lse=True)
    t, y, x = torch.arange(12) // 6, torch.arange(12) // 2 % 3, torch.arange(12) % 2
    pairs = table[:, t[:, None] - t + 1, y[:, None] - y + 2, x[:, None] - x + 1]
    torch.testing.assert_close(lse, pairs.logsumexp(-1)[None])


@pytest.mark.parametrize("kind", KINDS)
def test_changed_scores_compile_without_a_break(kind):
    case = Scored(plain_problem(dtype=torch.float32, batch=1, heads=2, kv_heads=1), (kind,))
    changes, learned = case.changes("cpu", torch.float32)
    q, k, v, *_ = case.problem.tensors()
    mask = case.mask

    def run(q, k, v, *learned):
        return attention(q, k, v, mask, scores=changes.with_tensors(learned)).square().sum()

    eager = torch.autograd.grad(run(q, k, v, *learned), (q, k, v, *learned))
    torch._dynamo.reset()
    whole = torch.compile(run, backend="aot_eager", fullgraph=True)
    compiled = torch.autograd.grad(whole(q, k, v, *learned), (q, k, v, *learned))
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one, other)


MADE = {
    "temperature": ((1, 2, 40), scores.temperature),
    "alibi": ((2,), scores.alibi),
    "log_decay": ((2,), scores.log_decay),
    "relative": ((2, 79), lambda x: scores.relative(x, lambda offset: offset + 39)),
    "t5": ((2, 8), lambda x: scores.relative(x, scores.t5_buckets(8, 16, bidirectional=False))),
    "relative_2d": ((2, 9, 15), lambda x: scores.relative_2d(x, 5, 8)),
    "relative_3d": ((2, 3, 7, 9), lambda x: scores.relative_3d(x, 2, 4, 5)),
    "key_bias": ((1, 2, 40), scores.key_bias),
    "bias": ((1, 2, 40, 40), scores.bias),
    "sink": ((2,), scores.sink),
    "several": ((2,), lambda x: scores.alibi(x) + scores.softcap(20.0) + scores.sink(x)),
}


@pytest.mark.parametrize("name", MADE)
def test_modifications_are_made_inside_of_a_graph(name):
    (shape, make), mask = MADE[name], masks.causal(40, block=16)
    q, k, v = torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    x = (0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(1))).requires_grad_()

    def run(q, x):
        return attention(q, k, v, mask, scores=make(x))

    torch._dynamo.reset()
    whole = torch.compile(run, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        eager, compiled = (f(q, x) for f in (run, whole))
        torch.testing.assert_close(eager, compiled)
        torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), x)[0] for out in (eager, compiled)))


def test_a_function_that_is_made_inside_of_a_graph_breaks_it_and_says_so():
    q, gain = torch.randn(1, 2, 20, 16), torch.ones(2)

    def run(q, **options):
        own = scores.function(lambda s, b, h, q, k, gain: s * gain[h], gain)
        return attention(q, q, q, scores=own, **options)

    for full in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(run, backend="aot_eager", fullgraph=full)
        torch.testing.assert_close(compiled(q, backend="reference"), run(q, backend="reference"))
        if not full:
            torch.testing.assert_close(compiled(q), run(q))
    with pytest.raises(Exception, match=r"scores\.function is a Python function, which no operator of PyTorch takes"):
        compiled(q)


def test_the_operator_passes_pytorchs_own_checks():
    q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
    changes = scores.alibi(torch.rand(2, requires_grad=True)) + scores.key_bias(torch.randn(1, 1, 20))
    problem = backends_problem.Problem.of(None, scale=0.25)
    arguments = (q, k, v, changes.tensors(), changes.described(), *problem)
    torch.library.opcheck(torch.ops.sparseflash.blockwise_scored.default, arguments)


def test_flops_are_those_of_the_products():
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (torch.randn(1, 2, 128, 16, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, scores=scores.softcap(1.0)).sum().backward()
    assert counter.get_total_flops() == 2 * (2 + 5) * 2 * 128 * 128 * 16 // 1


def test_autocast_casts_queries_but_not_learned_tensors():
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    slopes = torch.rand(2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, scores=scores.alibi(slopes))
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and slopes.grad.dtype == torch.float32

import contextlib
import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, attention, clear_caches, explain, masks, scores
from sparseflash.backends.triton import api
from sparseflash.backends.triton import device as gpu
from sparseflash.backends.triton.hopper import forward_softmax, passes, support
from sparseflash.backends.triton.hopper.configs import BLOCK
from sparseflash.backends.triton.persistent import cuts, plan
from sparseflash.backends.triton.prepared_call import PreparedCall
from sparseflash.backends.triton.versions import triton_version
from sparseflash.scores.change import Scores, Sizes
from sparseflash.scores.relative import Codes
from tests.backends.triton.hopper.hopper_problems import (
    CUT,
    PARTS,
    drawn,
    fixed_among,
    inputs,
    interpreted,
    scale_of,
    some_problem,
    some_small_problem,
    wide,
)
from tests.compared.exactness import new_memory_is_nan
from tests.compared.scored import Scored, check_results
from tests.drawn.counts import examples_times
from tests.drawn.masks import Recipe

KINDS = ("softcap", "alibi", "log_decay", "sink")
TABLES = ("t5", "clipped")
SOME = st.one_of(
    st.lists(st.sampled_from(KINDS), min_size=1, unique=True).filter(
        lambda kinds: not {"alibi", "log_decay"} <= {*kinds}
    ),
    st.builds(lambda table, others: [table, *others], st.sampled_from(TABLES), st.sampled_from([(), ("sink",)])),
    st.lists(st.sampled_from(("alibi", "sink")), unique=True).map(lambda others: ["key_bias", *others]),
)
SEEDS = st.integers(0, 2**16)


def run(case, **how):
    problem = case.problem
    mask = None if problem.recipe is None else problem.recipe.mask()
    q, k, v, dout, dlse = inputs(problem)
    changes, learned = case.changes("cpu", case.dtype)
    changes = changes.prepared(Sizes(problem.batch, problem.heads, problem.q_len, problem.k_len, q.device, mask))
    found = interpreted(mask, q, k, v, scale_of(problem), dout, dlse, changes=changes, **how)
    number = {id(x): number for number, x in enumerate(learned)}
    of_learned = [f"d{number[id(x)]}" for x in changes.tensors() if id(x) in number]
    return dict(zip(("out", "lse", "dq", "dk", "dv", *of_learned), found, strict=True))


@examples_times(1 / 2)
@given(
    drawn(most_tokens=300), SOME, st.booleans(), st.booleans(), SEEDS, st.integers(1, 5),
    st.sampled_from([plan.RULE, CUT]), st.sampled_from([cuts.RULE, PARTS]),
)  # fmt: skip
def test_exact_whatever_the_mask_the_cuts_and_the_interleaving(problem, kinds, half, shared, seed, programs, rule, cut):
    case = Scored(problem, tuple(kinds), shared, half, fixed=fixed_among(kinds))
    check_results(case, run(case, seed=seed, programs=programs, rule=rule, cut=cut))


@pytest.mark.parametrize(("most_filled", "cut"), [(0.0, cuts.RULE), (1.0, cuts.RULE), (1.0, PARTS)])
def test_a_sink_is_exact_in_blocks_of_64(most_filled, cut):
    case = Scored(some_small_problem(), ("sink",), half=False)
    check_results(case, run(case, most_filled=most_filled, cut=cut))


@examples_times(1 / 3)
@given(
    drawn(most_tokens=300).filter(lambda problem: problem.q_len > 1),
    st.booleans(), st.sampled_from([(), ("sink",)]), SEEDS, st.integers(1, 5),
    st.sampled_from([plan.RULE, CUT]), st.sampled_from([cuts.RULE, PARTS]),
)  # fmt: skip
def test_biases_of_pairs_are_exact(problem, shared, others, seed, programs, rule, cut):
    for kind in ("aligned bias", *(["tile bias"] if (problem.mask.block_q, problem.mask.block_k) == BLOCK else [])):
        which = {"fixed": (kind,)} if shared else {"own": (kind,)}
        case = Scored(problem, (kind, *others), shared, half=True, **which)
        check_results(case, run(case, seed=seed, programs=programs, rule=rule, cut=cut))


@examples_times(1 / 5)
@given(
    SEEDS, st.sampled_from([64, 128]), st.integers(1, 5),
    st.sampled_from([("softcap", "alibi", "sink"), ("alibi", "sink"), ("t5", "sink"), ("key_bias", "sink"),
                     ("aligned bias", "sink")]),
)  # fmt: skip
def test_the_bits_depend_on_no_interleaving(seed, dim, programs, kinds):
    case = Scored(some_problem(dim=dim, v_dim=dim), kinds, half="aligned bias" in kinds, fixed=fixed_among(kinds))
    first, got = run(case, programs=programs), run(case, seed=seed, programs=programs)
    assert len(got) == (6 if "softcap" in kinds else 7) and all(torch.equal(got[name], first[name]) for name in first)


@pytest.mark.parametrize(
    "kinds", [("softcap",), ("alibi",), ("key_bias",), ("aligned bias",), ("sink",), ("alibi", "sink")], ids="+".join
)
def test_a_scale_of_zero(kinds):
    case = Scored(some_problem(scale=0.0), kinds, half="aligned bias" in kinds)
    got = run(case)
    check_results(case, got)
    assert not got["dq"].any() and not got["dk"].any() and got["dv"].any()


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-30, -1e-30, 1e-25])
def test_under_a_tiny_scale_products_and_slopes_may_be_of_any_size(scale):
    def run(q, k, v, problem, changes):
        return interpreted(mask, q, k, v, problem.scale, changes=changes)

    # In one of fifty draws two scores of 10^6 differ by less than their rounding.
    torch.manual_seed(0)
    mask = masks.causal(200, block=128)
    q, k, v = (factor * torch.randn(1, 2, 200, 64).bfloat16() for factor in (1e15, 1e15, 1.0))
    changes = scores.alibi(torch.tensor([0.1, 1e19])) + scores.temperature(torch.ones(2))  # not cached
    asked = {"scores": changes, "scale": scale, "return_lse": True}
    with mock.patch.object(api, "attention", run):
        found = attention(q, k, v, mask, **asked, backend="triton")
    wanted = attention(q.double(), k.double(), v.double(), mask, **asked, backend="reference")
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y.to(x.dtype), rtol=1e-2, atol=1e-2)


def check_against_reference(got, tensors, mask, changes, dout, dlse=None, *, scale=0.125, rtol=1e-2, atol=2e-2):
    """Compares out, lse and the gradients of q, k, v and, if they are given, of the tensors of the modifications."""
    given = [x.detach().double().requires_grad_() for x in tensors]
    changes = changes.with_tensors(given[3:]) if given[3:] else changes
    wanted = attention(*given[:3], mask, scale=scale, scores=changes, return_lse=True, backend="reference")
    through = (wanted[:1], [dout.double()]) if dlse is None else (wanted, [dout.double(), dlse.double()])
    wanted += torch.autograd.grad(through[0], given, through[1])
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y.to(x.dtype), rtol=rtol, atol=atol)


@pytest.mark.parametrize("rule", [plan.RULE, CUT])
@pytest.mark.parametrize("logit", [-torch.inf, -300.0, 300.0])
def test_a_sink_far_above_or_below_all_scores_is_harmless(logit, rule):
    problem = some_problem()
    q, k, v, dout, dlse = inputs(problem)
    changes = scores.sink(torch.full((2,), logit)) + scores.softcap(20.0)
    how = {"changes": changes, "rule": rule}
    got = interpreted(problem.recipe.mask(), q, k, v, 0.125, dout, dlse, **how)
    check_against_reference(got, (q, k, v), problem.recipe.mask(), changes, dout, dlse, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("cap", [1e-30, 1e-19, 1e-12, 1e-6, 1e6, 1e30, 3e38])
def test_a_cap_of_any_size(cap):
    problem = some_problem()
    q, k, v, dout, dlse = inputs(problem)
    changes = Scores((scores.softcap(cap),))
    got = interpreted(problem.recipe.mask(), q, k, v, 0.125, dout, dlse, changes=changes)
    check_against_reference(got, (q, k, v), problem.recipe.mask(), changes, dout, dlse, atol=5e-3)


def test_a_query_without_keys_has_the_sink_alone():
    arguments = some_problem().recipe.arguments
    case = Scored(some_problem(recipe=Recipe("from_dense", arguments, (272, 0))), ("sink",))
    got = run(case)
    check_results(case, got)
    sink, _ = case.changes("cpu", case.dtype)
    assert torch.equal(got["lse"][1], sink.changes[0].logits.detach()[:, None].expand(got["lse"][1].shape))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "make",
    [
        lambda value: scores.alibi(torch.tensor([value])),
        lambda value: scores.relative(torch.full((1, 11), value), scores.clipped(5)),
    ],
    ids=["slope", "table"],
)
def test_a_query_without_a_key_is_zero_whatever_the_parameters(make, value):
    layout = torch.tensor([[0, 0, 1], [0, 0, 0], [1, 0, 0]], dtype=torch.bool)
    q = torch.randn(1, 1, 384, 64, dtype=torch.float16)
    changes = Scores((make(value),)).prepared(sizes_of(q, q))
    out, lse = interpreted(BlockMask.from_layout(layout, block=128), q, q, q, 0.125, changes=changes)
    assert not out[:, :, 128:256].any() and lse[:, :, 128:256].isneginf().all()


def sizes_of(q, k):
    return Sizes(len(q), q.shape[1], q.shape[2], k.shape[2], q.device)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("q_len", "k_len"), [(700, 700), (200, 1000)])
def test_tiles_with_one_bucket_far_from_both_ends(q_len, k_len, dim):
    q, k, v, dout = (torch.randn(1, 2, n, dim).half() for n in (q_len, k_len, k_len, q_len))
    k, v = k[:, :1].clone(), v[:, :1].clone()
    table = torch.randn(2, 16, requires_grad=True)
    changes = Scores((scores.relative(table, wide),)).prepared(sizes_of(q, k))
    got = interpreted(None, q, k, v, 0.1, dout, changes=changes)
    asked = Scores((scores.relative(table, wide),))
    check_against_reference(got, (q, k, v, table), None, asked, dout, scale=0.1, atol=5e-3)


def test_entries_of_minus_infinity_are_a_window():
    q, k, v, dout = (torch.randn(1, 1, 500, 64).bfloat16() for _ in range(4))
    table = torch.tensor([[-torch.inf, *[0.0] * 7]]).requires_grad_()

    def past(offsets):
        return (offsets + 300).clamp(0, 7)

    mask = masks.causal(500, block=128)
    changes = Scores((scores.relative(table, past),)).prepared(sizes_of(q, k))
    got = interpreted(mask, q, k, v, 0.125, dout, changes=changes)
    window = masks.local(500, window=300, causal=True, block=128)
    check_against_reference(got[:-1], (q, k, v), window, None, dout, atol=1e-2)
    assert got[-1].isfinite().all() and got[-1][0, 0] == 0


@pytest.mark.parametrize("shape", [(1, 1, 392), (2, 4, 392), (1, 4, 1), (2, 1, 1), (2, 1, 392)])
@pytest.mark.parametrize("cut", [cuts.RULE, PARTS])
def test_biases_of_keys_that_batch_heads_or_keys_share(shape, cut):
    """The query heads of a group have different patterns."""
    recipe = some_problem().recipe
    recipe = Recipe("from_dense", recipe.arguments | {"heads": [[0, 1, 1, 0]]}, (272, 170))
    problem = some_problem(recipe=recipe, heads=4, kv_heads=2)
    q, k, v, dout, dlse = inputs(problem)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    changes, mask = Scores((scores.key_bias(values),)), problem.recipe.mask()
    got = interpreted(mask, q, k, v, 0.125, dout, dlse, changes=changes, cut=cut)
    check_against_reference(got, (q, k, v, values), mask, changes, dout, dlse)


@pytest.mark.parametrize(("dim", "rule"), [(64, CUT), (128, plan.RULE)])
def test_biases_of_minus_infinity_are_padding(dim, rule):
    q, k, v, dout = (torch.randn(3, 2, 200, dim).half() for _ in range(4))
    dlse = torch.randn(3, 2, 200)
    live = torch.arange(200) < torch.tensor([180, 100, 0])[:, None, None]
    values = torch.zeros(3, 1, 200).masked_fill(~live, -torch.inf).requires_grad_()
    for mask in (None, masks.causal(200, block=128)):
        changes = Scores((scores.key_bias(values),))
        got = interpreted(mask, q, k, v, 0.125, dout, dlse, changes=changes, rule=rule)
        padded = (masks.causal(200, block=128) if mask is not None else BlockMask.dense(200, block=128)).with_lengths(
            q_lengths=[200, 200, 200], k_lengths=[180, 100, 0]
        )
        wanted = interpreted(padded, q, k, v, 0.125, dout, dlse)
        for x, y in zip(got[:-1], wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)
        assert not got[0][2].any() and got[1][2].isneginf().all()
        assert got[-1].isfinite().all() and not got[-1].masked_select(~live).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_biases_of_dead_keys_may_be_anything(value):
    """Hidden by the mask, in partial or dead tiles, or past the lengths."""
    q, k, v, dout = (torch.randn(2, 1, 400, 64).half() for _ in range(4))
    dlse, is_seen = torch.randn(2, 1, 400), torch.arange(400) % 300 >= 20
    mask = BlockMask.from_dense(is_seen.expand(400, 400), block=128).with_lengths([400, 390])
    values = torch.randn(2, 1, 400)
    is_dead = ~is_seen | (torch.arange(400) >= torch.tensor([400, 390])[:, None, None])
    found = []
    for fill in (0.0, value):
        changes = Scores((scores.key_bias(values.masked_fill(is_dead, fill).requires_grad_()),))
        found.append(interpreted(mask, q, k, v, 0.125, dout, dlse, changes=changes))
    assert all(torch.equal(x, y) and x.isfinite().logical_or(x.isneginf()).all() for x, y in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("forward", "value"),
    [("hopper", each) for each in (-1e30, -1e38, torch.finfo(torch.bfloat16).min, torch.finfo(torch.float32).min)]
    + [("triton", each) for each in (-1e30, -2e38)],
)
def test_padding_by_the_lowest_bias_has_finite_gradients(forward, value):
    """Some queries see padded keys alone, and the two passes may run on different kernels."""
    q, k, v, dout = (torch.randn(1, 2, 200, 64).half() for _ in range(4))
    values = torch.zeros(1, 1, 200).index_fill(2, torch.arange(100), value).requires_grad_()
    changes, mask = Scores((scores.key_bias(values),)), masks.causal(200, block=128)
    seen = contextlib.nullcontext()
    if forward == "triton":
        out, lse = attention(q, k, v, mask, scores=changes, scale=0.125, return_lse=True, backend="triton")
        assert out.isfinite().all()
        saved = out.detach(), lse.detach(), None
        seen = mock.patch.object(passes, "forward", lambda *given: lambda *call: saved)
    with seen:
        found = interpreted(mask, q, k, v, 0.125, dout, changes=changes)
    assert all(x.isfinite().all() for x in found)


def fused(source):
    """Scale and maximum are applied in one fused operation, as on a GPU."""
    exponents = "s * scale - m_safe[:, None]"
    assert exponents in source
    return source.replace(exponents, "gl.fma(s, scale, m_safe[:, None] * -1.0)")


FUSED = {forward_softmax.__file__: fused}


@pytest.mark.parametrize(
    ("scale", "rule", "edits"),
    [(0.125, plan.RULE, None), (0.125, CUT, FUSED), (1.0, plan.RULE, FUSED), (1.0, CUT, None)],
)
@pytest.mark.parametrize("value", [-5e7, 5e7, -1e9, 1e9, -1e30, 1e30, torch.finfo(torch.float32).min])
def test_queries_that_see_large_biases_alone(value, scale, rule, edits):
    """Beyond the limit lse is the limit."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 400, 64).half() for _ in range(3))
    changes = Scores((scores.key_bias(torch.zeros(1, 1, 400).index_fill(2, torch.arange(300), value)),))
    mask = masks.causal(400, block=128)
    out, lse = interpreted(mask, q, k, v, scale, changes=changes, rule=rule, edits=edits)
    out, lse, v = out[:, :, :300].double(), lse[:, :, :300].double(), v[:, :, :300].double()
    least, most = v.cummin(2).values, v.cummax(2).values
    assert ((out >= least - 1e-2) & (out <= most + 1e-2)).all() and out.any(-1).all()
    limit = 3e38 / max(1 / scale, 4)
    torch.testing.assert_close(lse, torch.full_like(lse, max(value, -limit)), rtol=1e-6, atol=0)
    if abs(value) > 1e20:
        mean = v.cumsum(2) / torch.arange(1, 301).view(-1, 1)
        torch.testing.assert_close(out, mean, rtol=0, atol=1e-2)


@pytest.mark.parametrize("edits", [None, FUSED])
@pytest.mark.parametrize(("scale", "values"), [(0.125, (-1e9, -1e10)), (0.125, (-1e37, -1e38)), (1e-3, (-1e30, -1e34))])
def test_of_two_low_biases_the_lower_one_is_padding(scale, values, edits):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 200, 64).half() for _ in range(3))
    biases = torch.full((1, 1, 200), values[1]).index_fill(2, torch.arange(50), values[0])
    changes = Scores((scores.key_bias(biases),))
    out, lse = interpreted(None, q, k, v, scale, changes=changes, edits=edits)
    torch.testing.assert_close(lse.double(), torch.full_like(lse, values[0]).double(), rtol=1e-6, atol=0)
    if values[0] < -1e20:
        mean = v[:, :, :50].double().mean(2, keepdim=True).expand_as(out)
        torch.testing.assert_close(out.double(), mean, rtol=0, atol=1e-2)


@pytest.mark.parametrize("value", [-4.5e7, -4.7e7, -5.5e7, -6.6e7, -6.8e7])
def test_gradients_about_the_lowest_lse(value):
    """Weights are 0 below the lowest lse; above it they are known to a few powers of 2."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 400, 64).half() for _ in range(4))
    changes = Scores((scores.key_bias(torch.full((1, 1, 400), value)),))
    gradients = interpreted(masks.causal(400, block=128), q, k, v, 0.125, dout, changes=changes)[2:]
    largest = max(x.abs().max() for x in gradients)
    assert largest < 300 if value > -(2**26) * math.log(2) else largest == 0


@pytest.mark.parametrize("value", [-1e8, -1e9, -1e10, -1e30])
def test_a_decay_beside_the_lowest_biases_is_finite(value):
    """The sum keeps only some bits of a steep decay."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 400, 64).half() for _ in range(4))
    padding = scores.key_bias(torch.zeros(1, 1, 400).index_fill(2, torch.arange(300), value))
    changes = scores.alibi(torch.tensor([8.0, 3.3])) + padding
    found = interpreted(masks.causal(400, block=128), q, k, v, 0.125, dout, changes=changes)
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("size", [1e3, -1e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_biases_of_keys_are_added_with_all_their_bits(dtype, size):
    """A bias that all keys share changes no weights."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 300, 64).to(dtype) for _ in range(4))
    values, mask = torch.randn(1, 2, 300), masks.causal(300, block=128)
    found, wanted = (
        interpreted(mask, q, k, v, 0.125, dout, changes=Scores((scores.key_bias(values + more),))) for more in (size, 0)
    )
    for x, y in zip((found[0], *found[2:]), (wanted[0], *wanted[2:]), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[1] - size, wanted[1], rtol=0, atol=abs(size) * 2**-22)


@pytest.mark.parametrize(
    ("kind", "dim", "shape", "rule"),
    [
        ("bias", 64, (1, 1), plan.RULE), ("bias", 64, (2, 2), CUT), ("bias", 128, (2, 1), CUT),
        ("bias", 128, (2, 2), plan.RULE), ("tile_bias", 64, (2, 2), plan.RULE), ("tile_bias", 128, (1, 2), CUT),
        ("tile_bias", 128, (2, 2), CUT),
    ],
)  # fmt: skip
def test_biases_of_pairs_may_have_anything_where_scores_are_dead(dim, shape, rule, kind):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 2, 272, dim).bfloat16() for _ in range(4))
    ends, dlse = torch.tensor([272, 170]), torch.randn(2, 2, 272)
    mask = masks.causal(272, block=128).with_lengths(ends)
    past = torch.arange(272) >= ends.view(-1, 1, 1)
    is_dead = torch.ones(272, 272, dtype=torch.bool).triu(1) | past[..., None] | past[..., None, :]
    is_dead = is_dead if shape[0] == 2 else is_dead.all(0, keepdim=True)
    values, found = torch.randn(*shape, 272, 272).bfloat16(), []
    for fill in (0.0, torch.nan):
        filled, learns = values.masked_fill(is_dead, fill), shape == (2, 2)
        changes = Scores((scores.bias(filled.requires_grad_(learns)),))
        if kind == "tile_bias":
            tiles = scores.tile_values(lambda q, k, filled=filled: filled[:, :, q, k], mask)
            changes = Scores((scores.tile_bias(tiles.detach().requires_grad_(learns), mask),))
            changes = changes.prepared(Sizes(2, 2, 272, 272, q.device, mask))
        found.append(interpreted(mask, q, k, v, 0.125, dout, dlse, changes=changes, rule=rule))
    assert all(torch.equal(x, y) and x.isfinite().logical_or(x.isneginf()).all() for x, y in zip(*found, strict=True))
    assert len(found[0]) == (6 if shape == (2, 2) else 5)


@pytest.fixture
def memory_is_nan():
    with new_memory_is_nan():
        yield


@pytest.mark.usefixtures("memory_is_nan")
@pytest.mark.parametrize("kind", ["aligned bias", "tile bias"])
@pytest.mark.parametrize(("rule", "cut"), [(plan.RULE, cuts.RULE), (CUT, PARTS)], ids=["whole", "cut"])
@pytest.mark.parametrize("dim", [64, 128])
def test_biases_of_pairs_under_several_patterns_are_exact(dim, rule, cut, kind):
    case = Scored(some_problem(dim=dim, v_dim=dim), (kind, "sink"), half=True, own=(kind,))
    check_results(case, run(case, rule=rule, cut=cut))


@pytest.mark.usefixtures("memory_is_nan")
@pytest.mark.parametrize("lengths", [(400, 250), (400, 0)])
def test_biases_of_pairs_have_gradients_of_zero_past_the_lengths_of_a_dense_mask(lengths):
    q, k, v, dout = (torch.randn(2, 2, 400, 64).half() for _ in range(4))
    mask, values = BlockMask.dense(400, block=128).with_lengths(lengths), torch.randn(2, 2, 400, 400).half()
    found = interpreted(mask, q, k, v, 0.125, dout, changes=Scores((scores.bias(values.requires_grad_()),)))
    past = torch.arange(400) >= torch.tensor(lengths)[:, None, None]
    assert all(x.isfinite().logical_or(x.isneginf()).all() for x in found)
    assert not found[-1].masked_select(past[..., None] | past[..., None, :]).any()


@pytest.mark.usefixtures("memory_is_nan")
@pytest.mark.parametrize("kind", ["aligned bias", "tile bias"])
def test_biases_of_pairs_without_a_live_tile_have_gradients_of_zero(kind):
    recipe = Recipe(
        "from_layout", {"q_len": 200, "k_len": 200, "block": (128, 128), "heads": [[0]], "share": 0.0, "seed": 0}
    )
    problem = some_problem(recipe=recipe, q_len=200, k_len=200, batch=1, heads=1)
    case = Scored(problem, (kind,), half=True, own=(kind,))
    found = run(case)
    assert found["lse"].isneginf().all()
    assert not any(x.any() for name, x in found.items() if name != "lse")


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float16, -65504.0), *((torch.bfloat16, x) for x in (-1e6, -1e30, -1e38, torch.finfo(torch.bfloat16).min))],
)
def test_padding_by_the_lowest_bias_of_pairs_is_finite(dim, dtype, value):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 200, dim).to(dtype) for _ in range(4))
    values = torch.zeros(1, 2, 200, 200, dtype=dtype)
    values[..., :100] = value
    changes, mask = Scores((scores.bias(values.requires_grad_()),)), masks.causal(200, block=128)
    out, lse, dq, *others = interpreted(mask, q, k, v, 0.125, dout, changes=changes)
    assert lse.isfinite().all() and all(x.isfinite().all() for x in others)
    given = [x.double().requires_grad_() for x in (q, k, v)]
    changes = changes.with_tensors([values.detach().double()])
    wanted = attention(*given, mask, scale=0.125, scores=changes, backend="reference")
    (wanted_dq,) = torch.autograd.grad(wanted, given[:1], dout.double())
    torch.testing.assert_close(out[:, :, 100:], wanted[:, :, 100:].to(dtype), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(dq[:, :, 100:], wanted_dq[:, :, 100:].to(dtype), rtol=2e-2, atol=2e-2)
    # fp32 does not hold the differences of scores this large.
    alike = v[:, :, :100].double().cumsum(2) / torch.arange(1, 101)[:, None]
    if value < -1e9:
        torch.testing.assert_close(out[:, :, :100], alike.to(dtype), rtol=1e-2, atol=1e-2)


def test_a_table_is_rounded_as_by_the_portable_kernels():
    """The other pass may run on the portable kernels."""
    q, k, v, dout = (torch.randn(1, 2, 300, 64).half() for _ in range(4))
    table = 4 * torch.randn(2, 32)
    results = []
    for each in (table, table.half().float()):
        change = scores.relative(each.requires_grad_(), scores.t5_buckets())
        changes = Scores((change,)).prepared(sizes_of(q, k))
        results.append(interpreted(None, q, k, v, 0.125, dout, changes=changes))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("add", [-3, 5, 1000])
def test_a_bucket_outside_the_table_is_the_nearest_where_nobody_could_refuse_it(add):
    """Under `torch.compile` the range is not checked."""
    q, k, v, dout = (torch.randn(1, 2, 272, 64).half() for _ in range(4))
    table = torch.randn(2, 32, requires_grad=True)
    codes = Scores((scores.relative(table, scores.t5_buckets()),)).prepared(sizes_of(q, k)).changes[0]
    results = []
    for buckets in (codes.buckets + add, (codes.buckets + add).clamp(0, 31)):
        changes = Scores((Codes(table, buckets, codes.q_codes, codes.k_codes, codes.until),))
        results.append(interpreted(None, q, k, v, 0.125, dout, changes=changes))
    assert all(map(torch.equal, *results))


def test_positions_are_aligned_at_the_ends():
    recipe = Recipe("causal", {"q_len": 130, "k_len": 390, "block": 128})
    for kinds in (("alibi",), ("log_decay", "softcap"), ("t5",)):
        problem = some_problem(recipe=recipe, q_len=130, k_len=390, heads=4, kv_heads=2)
        case = Scored(problem, kinds, fixed=fixed_among(kinds))
        check_results(case, run(case))


def test_the_derivative_of_a_cap_is_that_of_each_score():
    for scale in (0.01, 1.0, 4.0):
        case = Scored(some_problem(scale=scale), ("softcap",))
        check_results(case, run(case))


# ---------------------------------------------------------------------- supported score modifications

NO_GRADIENT = "they compute no gradient for the slopes of log_decay, nor for those of alibi beside softcap"


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(support, "is_interpreted", lambda: False)


@pytest.mark.usefixtures("compiled")
def test_they_take_caps_decays_and_sinks_and_queries_that_a_temperature_divides():
    q = torch.empty(2, 4, 8192, 128, dtype=torch.bfloat16, device="meta")
    slopes = torch.rand(4, device="meta")
    changes = scores.softcap(30.0) + scores.alibi(slopes) + scores.sink(slopes.clone().requires_grad_())
    changes += scores.temperature(slopes)
    found = explain(q, q, q, masks.causal(8192), scores=changes, capability=(9, 0))
    assert (found.forward.family, found.backward.family) == ("hopper", "hopper")


@pytest.mark.usefixtures("compiled")
def test_some_decays_that_are_learned_and_other_changes_are_the_portable_kernels():
    q = torch.empty(2, 4, 8192, 128, dtype=torch.bfloat16, device="meta")
    slopes = torch.rand(4, device="meta", requires_grad=True)
    found = explain(q, q, q, masks.causal(8192), scores=scores.alibi(slopes), capability=(9, 0))
    assert (found.forward.family, found.backward.family) == ("hopper", "hopper")
    for changes in (scores.log_decay(slopes), scores.alibi(slopes) + scores.softcap(30.0)):
        found = explain(q, q, q, masks.causal(8192), scores=changes, capability=(9, 0))
        assert found.backward.family == "portable"
        assert dict(found.backward.refusals)["hopper"] == NO_GRADIENT
    own = scores.function(lambda score, b, h, q, k: score.sin())
    found = explain(q, q, q, masks.causal(8192), scores=own, capability=(9, 0))
    assert found.forward.family == "portable"
    reason = "they support the score modifications softcap, alibi, log_decay, relative, key_bias, bias, tile_bias, sink"
    assert dict(found.forward.refusals)["hopper"] == f"{reason}; got function"


def families_and_refusal(changes):
    """The families of both passes, and why the Hopper kernels refuse the backward."""
    q = torch.empty(2, 4, 8192, 128, dtype=torch.bfloat16, device="meta")
    found = explain(q, q, q, masks.causal(8192), scores=changes, capability=(9, 0))
    return found.forward.family, found.backward.family, dict(found.backward.refusals).get("hopper")


@pytest.mark.usefixtures("compiled")
def test_they_take_biases_of_keys_with_a_linear_decay_and_a_sink():
    slopes, bias = torch.rand(4, device="meta"), scores.key_bias(torch.rand(2, 1, 8192, device="meta").requires_grad_())

    assert families_and_refusal(Scores((bias,))) == ("hopper", "hopper", None)
    assert families_and_refusal(bias + scores.alibi(slopes) + scores.sink(slopes)) == ("hopper", "hopper", None)
    reason = "they support key_bias only alone or beside alibi and a sink; got it beside "
    assert families_and_refusal(bias + scores.softcap(30.0)) == ("portable", "portable", reason + "softcap")
    found = families_and_refusal(bias + scores.log_decay(slopes))
    assert found == ("portable", "portable", reason + "log_decay")
    reason = "they support a relative-position table only alone or beside a sink; got one beside key_bias"
    assert families_and_refusal(bias + scores.relative(slopes[:, None].expand(4, 32), scores.t5_buckets()))[2] == reason


@pytest.mark.usefixtures("compiled")
def test_they_take_biases_of_pairs_that_the_copy_engine_can_read():
    def bias(*shape, dtype=torch.bfloat16):
        return Scores((scores.bias(torch.empty(*shape, device="meta", dtype=dtype, requires_grad=True)),))

    tokens = 8192, 8192
    assert families_and_refusal(bias(2, 4, *tokens)) == ("hopper", "hopper", None)
    assert families_and_refusal(bias(2, 4, *tokens) + scores.sink(torch.rand(4, device="meta")))[2] is None
    fixed = Scores((scores.bias(torch.empty(1, 1, *tokens, device="meta", dtype=torch.bfloat16)),))
    assert families_and_refusal(fixed) == ("hopper", "hopper", None)
    reason = "they compute no gradient for a bias that batch elements or heads share"
    for shared in (bias(1, 4, *tokens), bias(2, 1, *tokens)):
        assert families_and_refusal(shared) == ("hopper", "portable", reason)
    reason = "they need bias in q's dtype; got torch.float32"
    assert families_and_refusal(bias(2, 4, *tokens, dtype=torch.float32)) == ("portable", "portable", reason)
    reason = "they need bias with a number for every query and key, in rows aligned to 16 bytes"
    unaligned = torch.empty(1, 1, 8192, 8193, device="meta", dtype=torch.bfloat16)[..., :8192]
    for values in (unaligned, fixed.tensors()[0].mT, fixed.tensors()[0][..., :1]):
        assert families_and_refusal(Scores((scores.bias(values),))) == ("portable", "portable", reason)
    reason = "they support bias only alone or beside a sink; got it beside softcap"
    assert families_and_refusal(fixed + scores.softcap(30.0))[2] == reason
    slopes = torch.rand(4, device="meta")
    for decay, name in ((scores.alibi(slopes), "alibi"), (scores.log_decay(slopes), "log_decay")):
        assert families_and_refusal(fixed + decay)[2] == reason.replace("softcap", name)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("shape", [(2, 4), (1, 4)])
def test_they_take_biases_of_live_tiles_of_their_own_size(block, shape):
    mask = masks.local(8192, window=256, block=block)
    values = torch.empty(*shape, len(mask.indices), block, block, dtype=torch.bfloat16)
    bias = scores.tile_bias(values.requires_grad_(), mask)
    q = torch.empty(2, 4, 8192, 128, dtype=torch.bfloat16)
    found = explain(q, q, q, mask, scores=bias, capability=(9, 0))
    if block == 64:
        reason = "they support tile_bias only in blocks of 128 x 128; got 64 x 64"
        assert (found.forward.family, found.backward.family) == ("portable", "portable")
        assert dict(found.backward.refusals)["hopper"] == reason
    else:
        assert found.forward.family == "hopper"
        assert found.backward.family == ("hopper" if shape == (2, 4) else "portable")


@pytest.mark.usefixtures("compiled")
def test_they_take_tables_by_distance_alone_or_with_a_sink():
    def table(entries):
        return torch.rand(4, entries, device="meta", requires_grad=True)

    t5 = scores.relative(table(32), scores.t5_buckets())
    assert families_and_refusal(t5) == ("hopper", "hopper", None)
    assert families_and_refusal(t5 + scores.sink(torch.rand(4, device="meta"))) == ("hopper", "hopper", None)
    reason = "they support a relative-position table only alone or beside a sink; got one beside softcap"
    assert families_and_refusal(t5 + scores.softcap(30.0)) == ("portable", "portable", reason)
    of_keys = scores.key_bias(torch.rand(1, 1, 8192, device="meta"))
    assert families_and_refusal(t5 + of_keys) == ("portable", "portable", reason.replace("softcap", "key_bias"))
    of_cells = scores.relative_2d(torch.rand(4, 5, 7, device="meta"), 3, 4, cells=torch.arange(8192) % 12)
    assert families_and_refusal(of_cells)[:2] == ("portable", "portable")
    assert families_and_refusal(of_cells)[2].startswith("they support relative-position tables indexed by distance")
    assert families_and_refusal(scores.relative(table(256), scores.clipped(127))) == ("hopper", "hopper", None)
    assert families_and_refusal(scores.relative(table(257), scores.clipped(127)))[:2] == ("hopper", "portable")
    many = scores.relative(table(601), scores.clipped(300))
    reason = (
        "they compute gradients for at most 256 table entries, counted over the query heads that share keys; got 601"
    )
    assert families_and_refusal(many) == ("hopper", "portable", reason)


@pytest.mark.usefixtures("compiled")
def test_who_insists_on_them_learns_before_the_forward_that_slopes_get_no_gradient(monkeypatch):
    monkeypatch.setattr(gpu, "capability_of", lambda device: (9, 0))
    q, slopes = torch.zeros(1, 2, 256, 64, dtype=torch.float16), torch.ones(2, requires_grad=True)

    def prepare(call, *given):
        call.forward = lambda *given: (q, q[..., 0], None)

    with mock.patch.object(PreparedCall, "prepare_forward", prepare), torch.no_grad():
        attention(q, q, q, scale=0.125, scores=scores.log_decay(slopes), backend="hopper")
    for scale in (0.125, -0.125):  # a negative scale is never cached
        with pytest.raises(ValueError, match=f"the hopper kernels cannot serve this call: {NO_GRADIENT}"):
            attention(q, q, q, scale=scale, scores=scores.log_decay(slopes), backend="hopper")
    clear_caches()


@pytest.mark.usefixtures("compiled")
def test_explain_says_why_slopes_that_are_learned_have_no_backward_on_them():
    q, slopes = torch.empty(2, 4, 8192, 128, dtype=torch.bfloat16, device="meta"), torch.ones(4, requires_grad=True)
    asked = {"scores": scores.log_decay(slopes), "capability": (9, 0), "backend": "hopper"}
    with torch.no_grad():
        found = explain(q, q, q, masks.causal(8192), **asked)
    assert (found.forward.family, found.forward.refusals, found.backward.family) == ("hopper", (), None)
    assert found.backward.refusals == (("hopper", NO_GRADIENT),)
    assert f"backward: no kernels\n  not hopper: {NO_GRADIENT}\n" in str(found)
    assert [each.kernel for each in found.kernels] == ["forward"]
    with pytest.raises(ValueError, match=f"the hopper kernels cannot serve this call: {NO_GRADIENT}"):
        explain(q, q, q, masks.causal(8192), **asked)


# The backward at D = 64, which spills registers under older versions.
_CAPPED = "hopper" if triton_version() >= (3, 8) else "portable"


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("dim", "change", "families"),
    [
        (64, scores.softcap(30.0), ("hopper", _CAPPED)),
        (128, scores.softcap(30.0), ("hopper", "hopper")),
        (128, scores.log_decay(torch.ones(4)), ("portable", "hopper")),
        (64, scores.log_decay(torch.ones(4)), ("portable", "hopper")),
        (64, scores.log_decay(torch.ones(4)) + scores.softcap(30.0), ("portable", _CAPPED)),
        (64, scores.alibi(torch.ones(4)), ("hopper", "hopper")),
    ],
    ids=["capped-64", "capped-128", "logarithmic-128", "logarithmic-64", "both-64", "linear"],
)
def test_the_default_is_what_was_measured_faster(dim, change, families):
    q = torch.empty(2, 4, 8192, dim, dtype=torch.bfloat16, device="meta")
    found = explain(q, q, q, masks.local(8192, window=1024), scores=change, capability=(9, 0))
    assert (found.forward.family, found.backward.family) == families
    asked = explain(q, q, q, masks.local(8192, window=1024), scores=change, capability=(9, 0), backend="hopper")
    assert (asked.forward.family, asked.backward.family) == ("hopper", "hopper")

import math
from itertools import cycle
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from sparseflash import BlockMask, attention, masks, scores, testing
from sparseflash.testing import comparison, definition
from tests.compared.exactness import plain
from tests.compared.scored import FUNCTIONS, KINDS, Scored, results
from tests.drawn.masks import SEEDS, Recipe, block_masks
from tests.drawn.problems import Problem
from tests.watched.largest_tensor import LargestTensor

NAMES = ["out", "lse", "dq", "dk", "dv"]
RAGGED = masks.per_head([masks.local(200, window=60, block=32), masks.causal(200, block=32)])


def tensors(mask, *, batch=1, heads=2, kv_heads=2, dim=16, v_dim=24, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batch, heads = max(batch, mask.shape[0]), max(heads, mask.shape[1])
    shapes = ((heads, mask.q_len, dim), (kv_heads, mask.k_len, dim), (kv_heads, mask.k_len, v_dim))
    return [torch.randn(batch, *shape, generator=generator).to(dtype) for shape in shapes]


def inputs_for(mask, seed=0, **options):
    q, k, v = tensors(mask, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed + 1)
    dout = torch.randn(*q.shape[:3], v.shape[3], generator=generator, dtype=q.dtype)
    return testing.Inputs(q, k, v, dout, torch.randn(q.shape[:3], generator=generator, dtype=q.dtype))


def ours(mask, **options):
    return lambda q, k, v: attention(q, k, v, mask, return_lse=True, **options)


def dense_with_gradients(inputs, mask, scale=None):
    leaves = inputs.leaves()
    out, lse = attention(*leaves, mask, scale=scale, return_lse=True, backend="reference")
    gradients = torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse.to(lse.dtype)))
    return dict(zip(NAMES, (out.detach(), lse.detach(), *gradients)))


# ---------------------------------------------------------------------- the definition


@given(block_masks(100, batch=2, heads=2), st.sampled_from([1, 2 * 16 * 100, 1 << 25]), SEEDS)
def test_the_definition_is_the_reference_some_rows_at_a_time(mask, at_once, seed):
    inputs = inputs_for(mask, batch=2, kv_heads=1, seed=seed, dtype=torch.float64)
    want = dense_with_gradients(inputs, mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(definition, "SCORES_AT_ONCE", at_once)
        found = testing.by_definition(inputs, mask)
    assert list(found) == NAMES
    for name, result in want.items():
        torch.testing.assert_close(found[name], result, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_plain_computation_is_in_the_dtype_of_the_inputs(dtype):
    inputs = inputs_for(RAGGED, dtype=dtype)
    found = testing.by_definition(inputs, RAGGED)
    with plain():
        want = dense_with_gradients(inputs, RAGGED)
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in want.items()}
    assert torch.equal(found["out"][:, :, :32], want["out"][:, :, :32])


def test_a_long_mask_is_never_a_matrix(monkeypatch):
    monkeypatch.setattr(definition, "SCORES_AT_ONCE", 1 << 18)
    mask = masks.local(4096, window=64, causal=True)
    inputs = inputs_for(mask, heads=1, kv_heads=1)
    with LargestTensor() as largest:
        testing.by_definition(inputs.to(torch.float64), mask)
        testing.largest_score(inputs)
    assert largest.nbytes <= 8 * 128 * 4096


def test_the_magnitude_of_lse_is_that_of_the_largest_score(monkeypatch):
    inputs = inputs_for(RAGGED, kv_heads=1)
    want = (inputs.q.double().abs() @ inputs.k.double().abs().mT).max().item() / 4
    assert testing.largest_score(inputs) == pytest.approx(want)
    assert testing.largest_score(inputs, scale=-2.0) == pytest.approx(8 * want)
    monkeypatch.setattr(definition, "SCORES_AT_ONCE", 1)
    assert testing.largest_score(inputs) == pytest.approx(want)


# ---------------------------------------------------------------------- compare, assert_exact


@given(block_masks(60, batch=2, heads=2), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), SEEDS)
def test_ours_is_exact(mask, dtype, seed):
    found = testing.compare(ours(mask), *tensors(mask, batch=2, kv_heads=1, dtype=dtype, seed=seed), mask)
    assert list(found.errors) == NAMES
    assert found.exact, str(found)


def test_kernels_are_exact_where_no_query_has_two_keys():
    q, k, v = (
        x.requires_grad_() for x in tensors(masks.dense(1), batch=2, heads=4, dim=32, v_dim=32, dtype=torch.float16)
    )

    def ours(q, k, v):
        return attention(q, k, v, backend="triton")

    found = testing.compare(ours, q, k, v)
    assert found.exact, str(found)
    assert 0 < found.errors["dq"].largest <= found.errors["dq"].allowed < 3e-5
    wrong = testing.compare(lambda q, k, v: ours(q, k, v) + 1e-3 * q, q, k, v)
    assert wrong.ratios["dq"] > 30 and wrong.ratios["dk"] <= 1


@pytest.mark.parametrize(("queries", "keys"), [(4, 0), (0, 4), (0, 0)])
def test_nothing_to_compute_is_exact(queries, keys):
    q, k = torch.zeros(1, 1, queries, 8), torch.zeros(1, 1, keys, 8)
    assert testing.compare(attention, q, k, k).exact


def test_where_nothing_is_live_gradients_are_zero_to_the_last_bit():
    mask = BlockMask.from_dense(torch.zeros(40, 40, dtype=torch.bool), block=16)
    q, k, v = (x.requires_grad_() for x in tensors(mask, v_dim=16))
    assert testing.compare(lambda q, k, v: attention(q, k, v, mask), q, k, v, mask).exact
    wrong = testing.compare(lambda q, k, v: attention(q, k, v, mask) + 1e-30 * q, q, k, v, mask)
    assert wrong.ratios["dq"] == math.inf


def test_pytorchs_attention_is_exact_too():
    q, k, v = tensors(masks.causal(150), v_dim=16)

    def theirs(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    found = testing.compare(theirs, q, k, v, masks.causal(150))
    assert list(found.errors) == ["out", "dq", "dk", "dv"] and found.exact
    assert not testing.compare(theirs, q, k, v, masks.causal(150, offset=-1)).exact
    testing.assert_exact(scaled_dot_product_attention, q, k, v)


WRONG = {
    "scaled": (lambda out, lse: (out * 1.05, lse), ["out", "dq", "dk", "dv"]),
    "shifted": (lambda out, lse: (out.roll(1, 2), lse), ["out", "dq", "dk", "dv"]),
    "lse in bits": (lambda out, lse: (out, lse / math.log(2)), ["lse", "dq", "dk"]),
    "a row NaN": (lambda out, lse: (torch.cat([out[:, :, :-1], out[:, :, -1:] * math.nan], 2), lse), ["out"]),
    "a row missing": (lambda out, lse: (torch.cat([out[:, :, :-1], out[:, :, -1:] * 0], 2), lse), ["out"]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found_and_named(name, dtype):
    change, wrong = WRONG[name]
    x = tensors(RAGGED, dtype=dtype)
    found = testing.compare(lambda q, k, v: change(*ours(RAGGED)(q, k, v)), *x, RAGGED)
    assert {each for each, ratio in found.ratios.items() if ratio > 1} >= set(wrong)
    with pytest.raises(AssertionError, match=r"every error must be at most what is allowed; got\n +error +allowed"):
        testing.assert_exact(lambda q, k, v: change(*ours(RAGGED)(q, k, v)), *x, RAGGED)


def test_a_wrong_gradient_alone_is_found():
    def wrong_for_v(q, k, v):
        v = v.view_as(v)
        v.register_hook(lambda gradient: gradient * 1.01)
        return attention(q, k, v)

    found = testing.compare(wrong_for_v, *tensors(masks.dense(100)))
    assert [name for name, ratio in found.ratios.items() if ratio > 1] == ["dv"]


def without_gradients(q, k, v):
    with torch.no_grad():
        return attention(q, k, v, RAGGED)


def test_a_function_without_gradients_is_compared_only_where_that_was_asked_for():
    x = tensors(RAGGED)
    assert list(testing.compare(without_gradients, *x, RAGGED, gradients=False).errors) == ["out"]
    assert list(testing.compare(ours(RAGGED), *x, RAGGED, gradients=False).errors) == ["out", "lse"]
    testing.assert_exact(without_gradients, *x, RAGGED, gradients=False)
    with pytest.raises(AssertionError, match="every error must be"):
        testing.assert_exact(without_gradients, *x, gradients=False)
    for function in (without_gradients, lambda q, k, v: attention(q, k, v, RAGGED).detach()):
        with pytest.raises(ValueError, match=r"must return an out that requires grad, .* gradients=False"):
            testing.assert_exact(function, *x, RAGGED)


@pytest.mark.parametrize("cut", ["q", "k", "v"])
def test_a_gradient_that_does_not_arrive_is_named(cut):
    def function(q, k, v):
        given = {"q": q, "k": k, "v": v}
        return attention(*(x.detach() if name == cut else x for name, x in given.items()), RAGGED)

    with pytest.raises(ValueError, match=rf"depends on q, k and v; got one without d{cut}: was {cut} detached"):
        testing.compare(function, *tensors(RAGGED), RAGGED)


def test_lse_may_have_no_gradient():
    def without_that_of_lse(q, k, v):
        out, lse = ours(RAGGED)(q, k, v)
        return out, lse.detach()

    found = testing.compare(without_that_of_lse, *tensors(RAGGED), RAGGED)
    assert list(found.errors) == NAMES and found.exact


def test_the_table_has_its_columns_whatever_the_errors():
    errors = {name: testing.Error(largest, 2e-6) for name, largest in zip(NAMES, (1e-6, 1.9e-3, 2.5e-3, 1.5, math.inf))}
    assert [line.split()[-1] for line in str(testing.Comparison(errors)).splitlines()[1:]] == [
        "0.50", "950.00", "1.2e+03", "7.5e+05", "inf",
    ]  # fmt: skip
    assert len({len(line) for line in str(testing.Comparison(errors)).splitlines()}) == 1


def test_the_scale_and_given_gradients_count():
    inputs = inputs_for(RAGGED)
    x = inputs.q, inputs.k, inputs.v
    options = {"dout": inputs.dout, "dlse": inputs.dlse}
    assert testing.compare(ours(RAGGED, scale=0.7), *x, RAGGED, scale=0.7, **options).exact
    assert not testing.compare(ours(RAGGED, scale=0.7), *x, RAGGED, **options).exact
    zero = {name: torch.zeros_like(value) for name, value in options.items()}
    found = testing.compare(ours(RAGGED), *x, RAGGED, **zero)
    assert found.errors["dq"].largest == found.errors["dv"].allowed == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2])
def test_one_query_is_held_to_a_yardstick_of_many_draws(tokens, dtype):
    """A plain result of few numbers is sometimes exact, and then allows no error."""
    mask = masks.dense(tokens, 40)
    for seed in range(10):
        testing.assert_exact(ours(mask), *tensors(mask, heads=1, kv_heads=1, dtype=dtype, seed=seed), mask)


@pytest.mark.parametrize(("heads", "draws"), [(None, 20 * 4), (1, 20)])
def test_only_queries_that_see_a_key_are_values_to_measure_by(heads, draws):
    live = torch.zeros(300, 40, dtype=torch.bool)
    live[::15, 0] = True
    mask = BlockMask.from_dense(live, block=16)
    with mock.patch.object(comparison, "draws_for", wraps=testing.draws_for) as counted:
        testing.compare(ours(mask), *tensors(mask, batch=2), mask, heads=heads)
    counted.assert_called_once_with(draws, draws * 40, learned=False)


@pytest.mark.parametrize("wrong", [0.0, 1e-5])
def test_the_verdict_of_the_first_draws_is_that_of_all(wrong):
    mask = masks.local(40, window=9, block=16)
    for seed in range(10):
        x = tensors(mask, heads=1, kv_heads=1, dtype=torch.float32, seed=seed)

        def function(q, k, v):
            out, lse = ours(mask)(q, k, v)
            return out + wrong, lse

        some, all_ = (testing.compare(function, *x, mask, every_draw=each) for each in (False, True))
        assert some.exact == all_.exact == (not wrong)
        assert all(error.allowed <= all_.errors[name].allowed for name, error in some.errors.items())
        assert wrong or any(error.allowed < all_.errors[name].allowed for name, error in some.errors.items())


def test_long_sequences_are_compared_in_part():
    mask = masks.local(3000, window=100, block=64)
    x = tensors(mask, batch=2, heads=4, kv_heads=2)
    found = testing.compare(ours(mask), *x, mask, heads=2, blocks=4)
    assert list(found.errors) == NAMES and found.exact

    def wrong_at(batch, head, row):
        def function(q, k, v):
            out, lse = ours(mask)(q, k, v)
            wrong = torch.zeros_like(out)
            wrong[batch, head, row] = 1.0
            return out + wrong, lse

        return testing.compare(function, *x, mask, heads=2, blocks=4).exact

    assert not wrong_at(0, 0, 0) and not wrong_at(1, 3, 2999)
    assert wrong_at(0, 2, 0)


def test_parts_of_heads_of_other_patterns_differ_in_size():
    mask = masks.per_head([masks.local(3000, window=100, block=64), masks.butterfly(3000, block=64)])
    assert testing.compare(ours(mask), *tensors(mask), mask, heads=2, blocks=3).exact


def test_what_is_not_compared_must_be_finite():
    mask = masks.local(3000, window=100, block=64)
    x = tensors(mask, heads=4, kv_heads=4)

    def function(q, k, v):
        out = attention(q, k, v, mask)
        wrong = torch.zeros_like(out)
        wrong[0, 1, 777] = math.nan
        return out + wrong

    found = testing.compare(function, *x, mask, heads=1, blocks=2)
    assert found.errors["out"].largest == math.inf and not found.exact


def test_heads_and_batch_elements_of_masks_are_told_apart():
    mask = masks.per_batch([RAGGED, masks.per_head([masks.dense(200)] * 2)])
    x = tensors(mask, heads=2, kv_heads=1)
    assert testing.compare(ours(mask), *x, mask, heads=1).exact
    mask, x = RAGGED, tensors(RAGGED, heads=2, kv_heads=2)
    assert testing.compare(ours(mask), *x, mask, heads=2).exact
    assert not testing.compare(ours(mask), *x, mask.select(heads=[1, 0]), heads=1).exact


def test_the_tensors_are_left_as_they_are():
    x = tensors(RAGGED)
    before = [t.clone() for t in x]
    testing.compare(ours(RAGGED), *(t.requires_grad_() for t in x), RAGGED)
    assert all(map(torch.equal, x, before)) and all(t.grad is None for t in x)


# ---------------------------------------------------------------------- with changed scores


CHANGED = [*KINDS, *FUNCTIONS]


def changed(kind, dtype):
    recipe = Recipe("local", {"q_len": 40, "window": 20, "causal": True, "block": (16, 16)}, (40, 27))
    sizes = {"q_len": 40, "k_len": 40, "dim": 16, "v_dim": 24, "heads": 4, "kv_heads": 2, "batch": 2}
    problem = Problem(recipe, dtype=dtype, scale=0.3, layout="contiguous", seed=0, **sizes)
    case = Scored(problem, tuple(dict.fromkeys((kind, "sink"))))
    change, _ = case.changes("cpu", case.dtype)
    names = [*NAMES, *(f"d{number}" for number, x in enumerate(change.tensors()) if x.requires_grad)]
    return case, change, names


@pytest.mark.parametrize("kind", CHANGED)
def test_the_definition_with_changed_scores_is_the_reference(kind):
    case, change, names = changed(kind, torch.float64)
    found = testing.by_definition(
        testing.Inputs(*case.problem.tensors()), case.mask, scale=0.3,
        changes=testing.Changes(change, (2, 4, 40, 40), mask=case.mask),
    )  # fmt: skip
    assert list(found) == names
    for name, result in zip(names, results(case, "reference").values(), strict=True):
        torch.testing.assert_close(found[name], result, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("kind", "dtype"), list(zip(CHANGED, cycle([torch.float32, torch.bfloat16, torch.float64]))))
def test_ours_with_changed_scores_is_exact(kind, dtype):
    case, change, names = changed(kind, dtype)
    q, k, v, dout, dlse = case.problem.tensors()
    mask, options = case.mask, {"scale": 0.3, "scores": change, "dout": dout, "dlse": dlse}

    def function(q, k, v):
        return attention(q, k, v, mask, scale=0.3, return_lse=True, scores=change)

    found = testing.compare(function, q, k, v, mask, **options)
    assert list(found.errors) == names and found.exact, str(found)
    some = testing.compare(function, q, k, v, mask, **options, heads=2, blocks=2)
    assert list(some.errors) == NAMES and some.exact, str(some)
    assert not testing.compare(function, q, k, v, mask, scale=0.3).exact


def test_a_wrong_gradient_of_a_learned_tensor_is_found():
    q, k, v = tensors(RAGGED)
    slopes = torch.rand(2, requires_grad=True)
    change = scores.alibi(slopes)

    def doubled(q, k, v):
        return attention(q, k, v, RAGGED, scores=scores.alibi(2 * slopes - slopes.detach()))

    found = testing.compare(doubled, q, k, v, RAGGED, scores=change)
    assert [name for name, ratio in found.ratios.items() if ratio > 1] == ["d0"]
    with pytest.raises(AssertionError, match="every error must be at most"):
        testing.assert_exact(doubled, q, k, v, RAGGED, scores=change)
    with pytest.raises(
        ValueError, match=r"scores must be the modifications that the function applies, .* got \[2\] as the .* d0"
    ):
        testing.compare(ours(RAGGED), q, k, v, RAGGED, scores=change)
    with pytest.raises(ValueError, match="one entry for each of the 2 query heads; got 3"):
        testing.compare(ours(RAGGED), q, k, v, RAGGED, scores=scores.alibi(torch.ones(3)))


@pytest.mark.parametrize(
    ("function", "mask", "error", "message"),
    [
        (
            attention,
            masks.causal(30),
            ValueError,
            r"mask must be for the lengths .* for 30 queries and 30 keys, got 40",
        ),
        (attention, "causal", TypeError, r"mask must be a sparseflash BlockMask"),
        (lambda q, k, v: q[:, :1], None, ValueError, r"must return out \[1, 2, 40, 24\], or out and lse; got \[1, 1,"),
        (lambda q, k, v: None, None, ValueError, r"must return out \[1, 2, 40, 24\], or out and lse; got NoneType"),
        (lambda q, k, v: (v, q), None, ValueError, r"must return lse \[1, 2, 40\] beside out; got \[1, 2, 40, 16\]"),
        (masks.dense(40), None, TypeError, "function must be a function of q, k and v; got BlockMask"),
        (lambda q, k, v: (v, 3), None, ValueError, r"must return lse \[1, 2, 40\] beside out; got int"),
    ],
)
def test_what_cannot_be_compared_is_refused(function, mask, error, message):
    with pytest.raises(error, match=message):
        testing.compare(function, *tensors(masks.dense(40)), mask)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(2, 40, 16), ValueError, r"q must have shape \[batch, heads, tokens, head dim\]; got \[2, 40, 16\]"),
        (torch.ones(1, 2, 40, 16).numpy(), TypeError, r"q must be a tensor; got numpy\.ndarray"),
        (torch.ones(1, 40, 2, 16), ValueError, r"mask must be for the lengths .* pass q\.transpose\(1, 2\)"),
    ],
)
def test_inputs_of_a_model_in_place_of_q_k_and_v_are_refused_as_by_attention(x, error, message):
    with pytest.raises(error, match=message):
        testing.compare(attention, x, x, x, masks.causal(40))


# ---------------------------------------------------------------------- sampling


def test_sampled_heads_are_the_first_the_last_and_others():
    assert testing.sampled_heads(1, 1, 5) == [(0, 0)]
    assert testing.sampled_heads(2, 3, 1) == [(0, 0)]
    some = testing.sampled_heads(4, 8, 5, seed=3)
    assert some[:2] == [(0, 0), (3, 7)] and len(set(some)) == 5
    assert some == testing.sampled_heads(4, 8, 5, seed=3) != testing.sampled_heads(4, 8, 5, seed=4)
    assert len(set(testing.sampled_heads(4, 8, 99))) == 32


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 10), SEEDS)
def test_a_sampled_part_has_every_row_that_sees_its_key_blocks(rows, columns, blocks, seed):
    layout = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < 0.1
    part = testing.sampled_part(layout, 16, 32, blocks=blocks, seed=seed)
    assert bool(part.rows[0]) and bool(part.rows[-1]) and bool(part.columns[0]) and bool(part.columns[-1])
    assert not bool(layout[~part.rows][:, part.columns].any())
    assert part.whole == (str(part) == "in full")
    out = torch.arange(16 * rows - 3)[:, None]
    assert part.of("dq", out)[:, 0].tolist() == [q for q in range(16 * rows - 3) if part.rows[q // 16]]
    assert part.of("lse", out[:, 0]).tolist() == part.of("out", out)[:, 0].tolist()
    assert part.of("dv", torch.arange(32 * columns)[:, None])[:, 0].tolist() == [
        k for k in range(32 * columns) if part.columns[k // 32]
    ]

"""The Hopper forward in our interpreter: exact, and without deadlock in any interleaving."""

import math
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import BlockMask, scores
from sparseflash.backends import reference
from sparseflash.backends.triton.changes import hopper_pairs
from sparseflash.backends.triton.hopper import forward_ends, forward_loader, forward_steps
from sparseflash.backends.triton.persistent import plan
from sparseflash.scores.change import Scores
from tests.backends.triton.hopper import hopper_problems
from tests.backends.triton.hopper.hopper_problems import (
    CUT,
    assert_exact,
    drawn,
    inputs,
    interpreted,
    run,
    some_problem,
)
from tests.backends.triton.hopper.missing_lines import assert_noticed, lines_of, synchronising_lines, without
from tests.drawn.counts import examples_times
from tests.drawn.dynamic_masks import Loosened
from tests.drawn.masks import Recipe

SEEDS = st.integers(0, 2**16)
RULES = st.sampled_from([plan.RULE, CUT, CUT._replace(chunk=2), CUT._replace(chunk=3)])


@given(drawn(blocks=(64,)), SEEDS, st.integers(1, 4), RULES)
def test_exact_in_tiles_of_64(problem, seed, programs, rule):
    assert_exact(problem, run(problem, programs=programs, seed=seed, rule=rule))


@given(drawn(), SEEDS, st.integers(1, 4), RULES)
def test_exact_whatever_the_mask_and_the_interleaving(problem, seed, programs, rule):
    got = run(problem, programs=programs, seed=seed, rule=rule)
    assert_exact(problem, got)


@examples_times(1 / 2)
@given(
    drawn(head_dims=(16, 32, 80, 104, 192, 256), value_dims=(16, 48, 80, 128, 256), most_tokens=300), SEEDS,
    st.integers(1, 4), RULES,
)  # fmt: skip
@example(some_problem(dim=80, v_dim=80), 0, 3, CUT)
@example(some_problem(dim=192, v_dim=128), 0, 3, CUT)
@example(some_problem(dim=256, v_dim=256), 0, 3, plan.RULE)
def test_exact_at_any_head_dims(problem, seed, programs, rule):
    assert_exact(problem, run(problem, programs=programs, seed=seed, rule=rule))


@given(st.one_of(drawn(blocks=(128,)), drawn(blocks=(64,))), SEEDS, SEEDS, st.integers(1, 4))
def test_exact_under_masks_made_at_every_step(problem, of_arrays, seed, programs):
    problem = replace(problem, recipe=Loosened(problem.recipe, of_arrays))
    assert problem.recipe.mask().dynamic
    assert_exact(problem, run(problem, programs=programs, seed=seed))


@pytest.mark.parametrize(
    ("length", "rule"), [(129, CUT._replace(chunk=2)), *((n, plan.RULE) for n in (0, 1, 127, 128, 129, 256, 300, 500))]
)
def test_lengths_cut_a_list_anywhere(length, rule):
    kinds = torch.cartesian_prod(*[torch.arange(3)] * 3)
    live = (torch.arange(128) % 2 < kinds[..., None]).view(27, 384).repeat_interleave(128, 0)
    mask = BlockMask.from_dense(live, block=128)
    q, k, v = (
        torch.randn(1, 1, n, 64, generator=torch.Generator().manual_seed(n)).half() for n in (27 * 128, 384, 384)
    )
    lengths = torch.tensor([[27 * 128], [length]], dtype=torch.int32)
    got = interpreted(mask, q, k, v, 0.125, lengths=lengths, rule=rule)
    padded = BlockMask.from_dense(live & (torch.arange(384) < length), block=128)
    true = reference.attention(*(x.double() for x in (q, k, v)), padded, 0.125)
    torch.testing.assert_close(got[0].double(), true[0], rtol=0, atol=2e-3)
    torch.testing.assert_close(got[1].double(), true[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["full", "partial"])
def test_lengths_cut_lists_of_more_than_128_tiles(kind):
    tokens, keys, length = 128, 140 * 64, 137 * 64 + 5
    mask = BlockMask.dense(tokens, keys, block=64)
    if kind == "partial":
        mask = BlockMask.from_function(lambda q, k: (q + k) % 64 != 0, tokens, keys, block=64)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=g).half() for n in (tokens, keys, keys))
    lengths = torch.tensor([[tokens], [length]], dtype=torch.int32)
    got = interpreted(mask, q, k, v, 0.125, lengths=lengths, rule=plan.RULE._replace(worth=float("inf")))  # no chunks
    cut = mask.with_lengths(q_lengths=[tokens], k_lengths=[length])
    true = reference.attention(*(x.double() for x in (q, k, v)), cut, 0.125)
    torch.testing.assert_close(got[0].double(), true[0], rtol=0, atol=2e-4)
    torch.testing.assert_close(got[1].double(), true[1], rtol=0, atol=1e-5)


@examples_times(1 / 3)
@given(SEEDS, st.integers(1, 16), st.integers(2, 4))
def test_the_bits_depend_on_no_interleaving_and_on_no_number_of_programs(seed, programs, stages):
    first = run(some_problem(), programs=1, seed=0)
    got = run(some_problem(), programs=programs, seed=seed, stages=stages)
    assert all(map(torch.equal, got, first))


@pytest.mark.parametrize("rule", [plan.RULE, CUT])
def test_a_sequence_has_the_same_bits_alone_as_in_a_batch(rule):
    whole = run(some_problem(), rule=rule)
    q, k, v, _, _ = inputs(some_problem())
    for b, length in enumerate((272, 170)):
        for h in range(2):
            arguments = some_problem().recipe.arguments | {"heads": [[h]]}
            alone = some_problem(recipe=Recipe("from_dense", arguments, (length,)), batch=1, heads=1, kv_heads=1)
            values = q[b : b + 1, h : h + 1], k[b : b + 1], v[b : b + 1], None, None
            with mock.patch.object(hopper_problems, "inputs", lambda problem, values=values: values):
                got = run(alone, rule=rule)
            assert all(torch.equal(x[0, 0], y[b, h]) for x, y in zip(got, whole, strict=True))


NO_CHANGES = {
    "plain": (),
    "bias": (scores.bias(torch.zeros(1, 1, 128, 384).half()),),
    "decay": (scores.key_bias(torch.zeros(1, 1, 384).half()), scores.alibi(torch.zeros(1))),
}


@pytest.mark.parametrize(("dim", "block"), [(64, 64), (64, 128), (128, 128)])
@pytest.mark.parametrize("changed", NO_CHANGES)
@pytest.mark.parametrize("grows", [7.5, 8.5, 15.0, 17.0, 19.5])
def test_a_maximum_that_grows_from_tile_to_tile_overflows_nothing_in_fp16(grows, changed, dim, block):
    """The maximum grows by this many powers of 2 a tile: a weight relative to the first maximum would overflow."""
    tokens, keys = 128, 384
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.zeros(1, 1, tokens, dim), torch.zeros(1, 1, keys, dim), torch.randn(1, 1, keys, dim, generator=g)
    q[..., 0] = 1.0
    k[..., 0] = torch.arange(keys) // 128 * grows + torch.rand(keys, generator=g) / 8
    q, k, v = q.half(), k.half(), v.half()
    mask = BlockMask.dense(tokens, keys, block=block)
    changes = NO_CHANGES[changed]
    got = interpreted(mask, q, k, v, math.log(2.0), changes=Scores(changes) if changes else None)
    true = reference.attention(*(x.double() for x in (q, k, v)), mask, math.log(2.0))
    torch.testing.assert_close(got[0].double(), true[0], rtol=0, atol=2e-3)
    torch.testing.assert_close(got[1].double(), true[1], rtol=0, atol=1e-5)


def test_a_scale_of_zero_takes_the_mean():
    problem = some_problem(scale=0.0)
    assert_exact(problem, run(problem))


def test_one_key_of_a_scale_of_zero_has_an_lse_of_zero():
    """Not 1e-29, from the smallest scale, which replaces 0 in the kernel."""
    arguments = some_problem().recipe.arguments | {"patterns": [["full"]] * 2, "holes": "none", "k_len": 1}
    problem = some_problem(scale=0.0, k_len=1, recipe=Recipe("from_dense", arguments, None))
    assert (run(problem)[1] == 0).all()


# ---------------------------------------------------------------------- what the interpreter notices


def with_pairs(block):
    """A bias of pairs takes buffers of its own, and one of the two buffers of queries."""
    problem = some_problem(dim=128, v_dim=128)
    problem = replace(problem, recipe=replace(problem.recipe, arguments=problem.recipe.arguments | {"block": block}))
    values = torch.randn(2, 2, 272, 392, generator=torch.Generator().manual_seed(0)).half()
    return partial(run, problem, changes=Scores((scores.bias(values),)))


CASES = {
    "plain": partial(run, some_problem()),
    "128": with_pairs((128, 128)),
    "64": with_pairs((64, 64)),
    "256": partial(run, some_problem(dim=256, v_dim=256)),
}


@pytest.fixture(scope="module")
def right():
    return {name: case() for name, case in CASES.items()}


@pytest.mark.parametrize(("module", "line"), lines_of(forward_loader, forward_steps, forward_ends))
def test_the_interpreter_notices_a_missing_wait_arrival_or_fence(module, line, right):
    others = {module.__file__: without(line)}
    cases = [(partial(case, edits=others), right[name]) for name, case in CASES.items()]
    assert_noticed(cases, [{"seed": seed} for seed in range(40)])


@pytest.mark.parametrize("line", synchronising_lines(hopper_pairs, upto="the backward"))
def test_and_one_that_is_missing_in_a_score_modification(line, right):
    others = {hopper_pairs.__file__: without(line)}
    cases = [(partial(CASES[name], edits=others), right[name]) for name in ("128", "64")]
    assert_noticed(cases, [{"seed": seed} for seed in range(40)])

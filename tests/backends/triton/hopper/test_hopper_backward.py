"""The Hopper backward in our interpreter: exact, without deadlock, and with the same bits in every interleaving."""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import scores
from sparseflash.backends.triton.changes import hopper_pairs
from sparseflash.backends.triton.hopper import (
    backward_consumer,
    backward_loader,
    backward_sender,
    passes,
    wide_apart,
    wide_dkdv,
    wide_dq,
    wide_pass,
    wide_steps,
)
from sparseflash.backends.triton.hopper.configs import dkdv_config_for
from sparseflash.backends.triton.launcher import Launch
from sparseflash.backends.triton.persistent import backward_plan, cuts
from sparseflash.scores.change import Scores
from tests.backends.triton.hopper.hopper_problems import (
    PARTS,
    assert_exact,
    drawn,
    interpreted,
    run,
    some_problem,
    some_small_problem,
)
from tests.backends.triton.hopper.missing_lines import assert_noticed, lines_of, synchronising_lines, without
from tests.compared.exactness import LARGE_SCORES, check_weights_of_one
from tests.drawn.counts import examples_times
from tests.drawn.dynamic_masks import Loosened
from tests.drawn.masks import Recipe
from tests.drawn.problems import Problem

SEEDS = st.integers(0, 2**16)
RULES = st.sampled_from([cuts.RULE, PARTS, PARTS._replace(shortest=3)])


@examples_times(1 / 2)
@given(drawn(most_tokens=300), SEEDS, st.integers(1, 5), RULES)
def test_exact_whatever_the_mask_the_cuts_and_the_interleaving(problem, seed, programs, cut):
    assert_exact(problem, run(problem, gradients=True, programs=programs, seed=seed, cut=cut))


@examples_times(1 / 3)
@given(
    drawn(most_tokens=260, head_dims=(16, 40, 80, 104, 192, 256), value_dims=(16, 72, 128, 256)), SEEDS,
    st.integers(1, 5), RULES,
)  # fmt: skip
@example(some_problem(dim=192, v_dim=128), 0, 3, PARTS)
@example(some_problem(dim=256, v_dim=256, k_len=440, recipe=None), 2, 4, cuts.RULE)
@example(some_problem(dim=32, v_dim=32), 0, 3, PARTS)
@example(some_problem(dim=40, v_dim=72), 1, 3, cuts.RULE)
def test_exact_at_any_head_dims(problem, seed, programs, cut):
    assert_exact(problem, run(problem, gradients=True, programs=programs, seed=seed, cut=cut))


def drawn_small(**more):
    return drawn(most_tokens=200, blocks=(64,), **more).filter(lambda problem: problem.mask.block_q == 64)


@examples_times(1 / 2)
@given(
    drawn_small(head_dims=(16, 64, 80, 96, 128), value_dims=(16, 72, 128)), SEEDS, st.integers(1, 5), RULES,
)  # fmt: skip
@example(some_small_problem(), 0, 3, PARTS)
@example(some_small_problem(dim=128, v_dim=128), 1, 3, cuts.RULE)
@example(some_small_problem(dim=80, v_dim=72), 2, 2, PARTS)
def test_exact_in_tiles_of_64(problem, seed, programs, cut):
    with mock.patch.object(passes, "BackwardLayout", side_effect=AssertionError("tiles of 128")):
        got = run(problem, gradients=True, programs=programs, seed=seed, cut=cut, most_filled=1.0)
    assert_exact(problem, got)


@examples_times(1 / 3)
@given(drawn_small(), SEEDS, SEEDS, st.integers(1, 5))
def test_exact_in_tiles_of_64_under_masks_made_at_every_step(problem, of_arrays, seed, programs):
    problem = replace(problem, recipe=Loosened(problem.recipe, of_arrays))
    with mock.patch.object(passes, "BackwardLayout", side_effect=AssertionError("tiles of 128")):
        got = run(problem, gradients=True, programs=programs, seed=seed)
    assert_exact(problem, got)


@examples_times(1 / 3)
@given(SEEDS, st.sampled_from([64, 96, 128]), st.integers(1, 5), RULES)
def test_the_bits_depend_on_no_interleaving_in_tiles_of_64(seed, dim, programs, cut):
    problem, how = some_small_problem(dim=dim, v_dim=dim), {"programs": programs, "cut": cut, "most_filled": 1.0}
    first = run(problem, gradients=True, **how)
    assert all(map(torch.equal, run(problem, gradients=True, seed=seed, **how), first))


@examples_times(1 / 2)
@given(
    drawn(most_tokens=300, blocks=(128,), head_dims=(64, 80, 96, 128, 192), value_dims=(64, 256)), SEEDS, SEEDS,
    st.integers(1, 16),
)  # fmt: skip
def test_exact_under_masks_made_at_every_step(problem, of_arrays, seed, programs):
    problem = replace(problem, recipe=Loosened(problem.recipe, of_arrays))
    assert_exact(problem, run(problem, gradients=True, programs=programs, seed=seed))


@examples_times(1 / 3)
@given(SEEDS, st.sampled_from([64, 80, 128]), st.integers(1, 5), st.integers(2, 3), st.integers(2, 3), RULES)
def test_the_bits_depend_on_no_interleaving(seed, dim, programs, q_stages, dout_stages, cut):
    problem = some_problem(dim=dim, v_dim=dim)
    first = run(problem, gradients=True, programs=programs, cut=cut)
    other = {"q_stages": q_stages, "dout_stages": dout_stages}
    got = run(problem, gradients=True, programs=programs, seed=seed, backward=other, cut=cut)
    assert all(map(torch.equal, got, first))


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_a_tile_with_several_chains_is_their_sum(longest):
    problem = some_problem()
    with (
        mock.patch.object(backward_plan, "_SHORTEST_CHAIN", longest),
        mock.patch.object(backward_plan, "_LONG_CHAIN", 0),
    ):
        assert_exact(problem, run(problem, gradients=True))


def test_the_column_of_a_global_token_is_cut_and_the_others_keep_their_bits():
    recipe = Recipe("streaming", {"q_len": 800, "window": 1, "sink": 128, "block": 128})
    problem = some_problem(recipe=recipe, batch=1, heads=3, kv_heads=1, q_len=800, k_len=800, dim=96, v_dim=96)
    got = run(problem, gradients=True, programs=5, cut=cuts.RULE._replace(shortest=4))
    assert_exact(problem, got)
    whole = run(problem, gradients=True, programs=5)
    for x, y in zip(got[3:], whole[3:], strict=True):
        assert torch.equal(x[:, :, 128:], y[:, :, 128:]) and not torch.equal(x, y)


def test_without_a_gradient_of_lse(monkeypatch):
    problem, tensors = some_problem(), Problem.tensors
    monkeypatch.setattr(Problem, "tensors", lambda *of: (*(given := tensors(*of))[:4], torch.zeros_like(given[4])))
    assert_exact(problem, run(problem, gradients=True, through_lse=False))


@pytest.mark.parametrize(("heads", "kv_heads", "q_len", "k_len"), [(2, 2, 300, 300), (4, 2, 130, 260)])
def test_without_a_mask(heads, kv_heads, q_len, k_len):
    problem = some_problem(recipe=None, heads=heads, kv_heads=kv_heads, q_len=q_len, k_len=k_len)
    assert_exact(problem, run(problem, gradients=True, programs=5))


def test_rows_that_begin_anywhere_are_copied():
    problem = some_problem(layout="sliced")
    assert_exact(problem, run(problem, gradients=True))


def test_a_scale_of_zero_moves_values_alone():
    problem = some_problem(scale=0.0)
    got = run(problem, gradients=True)
    assert_exact(problem, got)
    assert not got[2].any() and not got[3].any() and got[4].any()


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("largest", LARGE_SCORES)
def test_gradients_of_large_scores(largest, dim):
    def gradients_of(q, k, v, dout, mask, scale):
        return interpreted(mask, q, k, v, scale, dout)[2:]

    check_weights_of_one(largest, gradients_of, dim)


def test_sequences_without_a_token_have_no_gradients():
    problem = some_problem(recipe=Recipe("from_dense", some_problem().recipe.arguments, (272, 0)))
    got = run(problem, gradients=True)
    assert_exact(problem, got)
    assert all(not x[1].any() for x in got[2:])


def test_a_mask_without_a_live_tile_has_no_entries_and_gradients_of_zero(monkeypatch):
    arguments, bound = {**some_problem().recipe.arguments, "patterns": [["dead"], ["dead"]]}, []
    bind = Launch.bind

    def recorded(self, programs, **tensors):
        bound.append(tensors)
        return bind(self, programs, **tensors)

    monkeypatch.setattr(Launch, "bind", recorded)
    got = run(some_problem(recipe=Recipe("from_dense", arguments)), gradients=True)
    assert got[1].isneginf().all() and not any(x.any() for x in (got[0], *got[2:]))
    assert any("entry_ptr" in tensors for tensors in bound)
    assert all(x.data_ptr() for tensors in bound for x in tensors.values()), "a kernel gets no null pointer"


# ---------------------------------------------------------------------- what the interpreter notices


HOW = {"gradients": True, "programs": 4, "backward": {"q_stages": 3, "dout_stages": 2}}


PAIRS = torch.randn(2, 2, 272, 392, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
CASES = [
    partial(run, some_problem(), **HOW),
    partial(run, some_problem(), **HOW, changes=Scores((scores.bias(PAIRS),))),
    partial(run, some_problem(dim=80, v_dim=80), **HOW),
]


@pytest.fixture(scope="module")
def right():
    return [case() for case in CASES]


def run_with_few_stages(*arguments, **how):
    def few(*of):
        return dkdv_config_for(*of)._replace(q_stages=2, dout_stages=1)

    with mock.patch.object(wide_pass, "dkdv_config_for", few):
        return run(*arguments, **how)


# Tiles of 64; with registers for dP before the exponentials; with few stages, so that no wait is implied by another; dk
# and dv apart, the one that runs `wide_apart`.
WIDE = [
    partial(run, some_small_problem(dim=128, v_dim=128), gradients=True, programs=2, most_filled=1.0),
    partial(run, some_problem(dim=144, v_dim=64), gradients=True, programs=4),
    partial(run_with_few_stages, some_problem(dim=192, v_dim=128), gradients=True, programs=4),
    partial(run, some_problem(dim=256, v_dim=256), gradients=True, programs=4),
]


@pytest.fixture(scope="module")
def right_of_wide():
    return [each() for each in WIDE]


@pytest.mark.parametrize(("module", "line"), lines_of(wide_apart, wide_dkdv, wide_dq, wide_steps))
def test_the_interpreter_notices_a_missing_one_of_the_kernels_for_wide_heads(module, line, right_of_wide):
    changed = [partial(each, edits={module.__file__: without(line)}) for each in WIDE]
    cases = list(zip(changed, right_of_wide, strict=True))
    assert_noticed(cases[3:] if module is wide_apart else cases, [{"seed": seed} for seed in range(20)])


@pytest.mark.parametrize(("module", "line"), lines_of(backward_loader, backward_sender, backward_consumer))
def test_the_interpreter_notices_a_missing_wait_arrival_or_fence(module, line, right):
    changed = [partial(case, edits={module.__file__: without(line)}) for case in CASES]
    assert_noticed(list(zip(changed, right, strict=True)), [{"seed": seed} for seed in range(20)])


@pytest.mark.parametrize("line", synchronising_lines(hopper_pairs, after="the backward"))
def test_and_one_that_is_missing_in_a_score_modification(line, right):
    others = {hopper_pairs.__file__: without(line)}
    changed = partial(CASES[1], edits=others)
    assert_noticed([(changed, right[1])], [{"seed": seed} for seed in range(20)])

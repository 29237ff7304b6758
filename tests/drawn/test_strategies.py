import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.drawn.masks import (
    BUILDERS,
    HOLES,
    RULES,
    TILES,
    Recipe,  # noqa: F401 - evaluated
    blocks,
    dense_mask,
    lengths,
    recipes,
    rule,
)
from tests.drawn.problems import LAYOUTS, Problem, laid_out, problems

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DRAWS = 50
PROBLEMS = problems(128, (16, 40), (16, 24), (16, 32), DTYPES)


def draws(strategy, number):
    drawn = []

    @seed(number)
    @settings(max_examples=DRAWS, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(strategy)
    def look(value):
        drawn.append(value)

    look()
    return drawn


def assert_occur(strategy, names, wanted, *, count=4000):
    """Each of the wanted names is among `names(drawn)` in one of at most `count` draws.

    Several short runs find more than one long one, because Hypothesis repeats parts of earlier draws.
    """
    never = set(wanted)
    for number in range(count // DRAWS):
        for drawn in draws(strategy, number):
            never -= set(names(drawn))
        if not never:
            return
    raise AssertionError(f"in {count} draws not once: {[name for name in wanted if name in never]}")


# ---------------------------------------------------------------------- sizes


def test_blocks_are_square_and_rectangular_both_ways():
    assert_occur(
        blocks(), lambda b: [(b[0] > b[1]) - (b[0] < b[1]), b], [0, 1, -1, *((b, b) for b in (16, 32, 64))], count=100
    )


def test_awkward_lengths_are_likely():
    awkward = (1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 100)
    assert_occur(lengths(100, 32), lambda n: [n], awkward, count=400)


# ---------------------------------------------------------------------- dense masks


def tile_of(kind):
    dense = dense_mask(q_len=96, k_len=96, block=(32, 32), patterns=[[kind]], heads=[[0]], holes="none", seed=5)
    return dense[0, 0].view(3, 32, 3, 32).transpose(1, 2).reshape(9, 32, 32)


@pytest.mark.parametrize("kind", TILES)
def test_only_random_tiles_differ_from_each_other(kind):
    made = tile_of(kind)
    assert len(made.unique(dim=0)) == (9 if kind == "random" else 1)


def test_kinds_of_tile_are_what_they_are_called():
    every = torch.ones(32, 32, dtype=torch.bool)
    assert tile_of("full").all() and not tile_of("dead").any()
    assert torch.equal(tile_of("lower")[0], every.tril())
    assert torch.equal(tile_of("upper")[0], every.triu(1))
    assert tile_of("single")[0].sum() == 1
    for kind in ("repeated", "random"):
        assert tile_of(kind)[0].any() and not tile_of(kind)[0].all()


@pytest.mark.parametrize("holes", HOLES)
def test_holes_empty_rows_and_columns(holes):
    for number in range(20):
        dense = dense_mask(
            q_len=70, k_len=100, block=(16, 16), patterns=[["full"]], heads=[[0]], holes=holes, seed=number
        )[0, 0]
        rows, columns = ~dense.any(1), ~dense.any(0)
        assert rows.any() == (holes in ("rows", "both")) or not dense.any()
        assert columns.any() == (holes in ("columns", "both")) or not dense.any()
        assert torch.equal(dense, ~(rows[:, None] | columns[None, :]))


def test_heads_use_the_pattern_of_their_number():
    dense = dense_mask(
        q_len=20, k_len=30, block=(16, 16), patterns=[["full"], ["dead"]], heads=[[0, 1, 0], [1, 1, 0]],
        holes="none", seed=0,
    )  # fmt: skip
    assert dense.shape == (2, 3, 20, 30)
    assert dense.any(-1).any(-1).tolist() == [[True, False, True], [False, False, True]]


# ---------------------------------------------------------------------- block masks


def arguments_of(recipe):
    yield recipe.builder
    for name, value in recipe.arguments.items():
        if name in ("causal", "rule_name", "holes"):
            yield f"{name} {value}"
        if name == "factors":
            yield "all factors" if value is None else "some factors"


def test_every_builder_and_argument_occurs():
    wanted = [
        *BUILDERS, *(f"rule_name {name}" for name in RULES), *(f"holes {name}" for name in HOLES),
        "causal True", "causal False", "all factors", "some factors",
    ]  # fmt: skip
    assert_occur(recipes(128, (16, 32, 64), 2, 3), arguments_of, wanted)


def features_of_mask(recipe):
    mask = recipe.mask()
    dense = mask.to_dense()
    yield f"batch {mask.pattern.shape[0]}"
    yield f"heads {mask.pattern.shape[1]}"
    yield "all live" if dense.all() else "some dead"
    yield "full tile" if (mask.tile == 0).any() else "no full tile"
    yield "partial tile" if (mask.tile > 0).any() else "no partial tile"
    if 0 < len(mask.bits) < int((mask.tile > 0).sum()):
        yield "repeated partial tile"
    yield "no tile" if len(mask.tile) == 0 else "some tile"
    for name, length, block in (("queries", mask.q_len, mask.block_q), ("keys", mask.k_len, mask.block_k)):
        yield f"ragged {name}" if length % block else f"whole blocks of {name}"
        if length < block:
            yield f"less than a block of {name}"
        if length == 1:
            yield f"one of {name}"
    yield "square" if mask.q_len == mask.k_len else f"more {'queries' if mask.q_len > mask.k_len else 'keys'}"
    yield "square blocks" if mask.block_q == mask.block_k else "rectangular blocks"
    distinct = len(mask.pattern.unique())
    yield "several patterns" if distinct > 1 else "one pattern"
    if distinct < mask.pattern.numel():
        yield "shared pattern"
    if dense.any(-1).any() and not dense.any(-1).all():
        yield "empty row"
    if dense.any() and not dense.any(-2).all():
        yield "empty column"
    yield "no lengths" if recipe.lengths is None else "lengths"
    longest = max(mask.q_len, mask.k_len)
    given = recipe.lengths or ()
    if given and isinstance(given[0], tuple):
        yield "lengths of queries and keys"
        given = (*given[0], *given[1])
    for length in given:
        yield (
            "length 0" if length == 0
            else "length beyond" if length > longest
            else "length whole" if length == longest
            else "length ragged" if length % mask.block_q and length % mask.block_k
            else "length other"
        )  # fmt: skip


def test_every_kind_of_mask_occurs():
    wanted = [
        "full tile", "no full tile", "partial tile", "no partial tile", "repeated partial tile", "no tile", "some tile",
        "square", "more queries", "more keys", "square blocks", "rectangular blocks",
        *(f"{what} {of}" for what in ("ragged", "whole blocks of", "less than a block of", "one of")
          for of in ("queries", "keys")),
        "several patterns", "one pattern", "shared pattern", "empty row", "empty column", "all live", "some dead",
        "batch 1", "batch 2", "heads 1", "heads 3",
        "no lengths", "lengths", "lengths of queries and keys", "length 0", "length beyond", "length whole",
        "length ragged",
    ]  # fmt: skip
    assert_occur(recipes(128, (16, 32, 64), 2, 3), features_of_mask, wanted)


@pytest.mark.parametrize("name", RULES)
def test_rules_differ_from_each_other(name):
    def dense(name):
        live = rule(name, 7)(torch.arange(40)[:, None], torch.arange(40)[None, :])
        return live.expand(40, 40)

    assert all(not torch.equal(dense(name), dense(other)) for other in RULES if other != name)


# ---------------------------------------------------------------------- problems


@given(PROBLEMS)
def test_problems_fit_together(problem):
    assert problem.heads % problem.kv_heads == 0
    assert 1 <= problem.heads <= 4 and 1 <= problem.batch <= 2
    assert 1 <= problem.q_len <= 128 and 1 <= problem.k_len <= 128
    assert problem.dim in (16, 40) and problem.v_dim in (16, 24) and problem.dtype in DTYPES
    if problem.recipe is None:
        assert problem.mask is None
    else:
        problem.mask.validate()
        assert problem.mask is problem.mask
        assert (problem.mask.q_len, problem.mask.k_len) == (problem.q_len, problem.k_len)
        assert problem.mask.shape[0] in (1, problem.batch) and problem.mask.shape[1] in (1, problem.heads)
        assert problem.mask.lengths is None or problem.mask.lengths.shape == (2, problem.batch)


@given(PROBLEMS)
def test_values_are_the_same_every_time_in_every_layout_and_dtype(problem):
    tensors = problem.tensors()
    assert all(torch.equal(x, y) for x, y in zip(tensors, problem.tensors()))
    for layout in LAYOUTS:
        other = dataclasses.replace(problem, layout=layout).tensors()
        assert all(torch.equal(x, y) for x, y in zip(tensors, other))
    exact = dataclasses.replace(problem, dtype=torch.float64).tensors()
    assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip(tensors, exact))


def test_values_are_normal_and_go_with_the_seed():
    problem = Problem(None, 2, 4, 2, 100, 90, 40, 24, torch.float64, None, "contiguous", seed=1)
    tensors = problem.tensors()
    for x in tensors:
        assert abs(x.mean()) < 0.1 and abs(x.std() - 1) < 0.1
    other = dataclasses.replace(problem, seed=2).tensors()
    assert all(not torch.equal(x, y) for x, y in zip(tensors, other))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_are_what_they_are_called(dtype):
    x = torch.randn(2, 3, 5, 16).to(dtype)
    plain, tokens_first, sliced = (laid_out(x, layout) for layout in LAYOUTS)
    assert all(torch.equal(y, x) and y.stride(-1) == 1 for y in (plain, tokens_first, sliced))
    assert plain.is_contiguous()
    assert tokens_first.transpose(1, 2).is_contiguous() and not tokens_first.is_contiguous()
    assert sliced.stride() == (3 * 5 * 19, 5 * 19, 19, 1)
    assert sliced.storage_offset() == 1 and sliced.data_ptr() % 16 != 0
    around = torch.as_strided(sliced, (2 * 3 * 5, 19), (19, 1), 0)
    assert around[:, 0].isnan().all() and around[:, -2:].isnan().all() and not around[:, 1:-2].isnan().any()


@given(PROBLEMS)
def test_a_problem_can_be_pasted_from_its_repr(problem):
    text = repr(problem)
    assert len(text) < 1000
    again = eval(text)
    assert again == problem
    assert again.mask == problem.mask
    assert all(torch.equal(x, y) for x, y in zip(again.tensors(), problem.tensors()))


def features_of_problem(problem):
    yield problem.layout
    yield problem.dtype
    yield f"dim {problem.dim}"
    yield f"v_dim {problem.v_dim}"
    yield "no mask" if problem.recipe is None else "mask"
    if problem.kv_heads == problem.heads > 1:
        yield "a key head each"
    if 1 == problem.kv_heads < problem.heads:
        yield "one key head"
    if 1 < problem.kv_heads < problem.heads:
        yield "grouped heads"
    if problem.scale is None:
        yield "scale by default"
    else:
        yield "scale 0" if problem.scale == 0 else "scale > 0" if problem.scale > 0 else "scale < 0"
    if problem.mask is not None:
        if problem.mask.pattern.shape == (problem.batch, problem.heads) and problem.batch > 1 and problem.heads > 1:
            yield "a mask for each batch element and head"
        if problem.batch > 1 and problem.mask.shape[0] == 1:
            yield "one mask for the batch"
        if problem.mask.lengths is not None:
            yield "lengths"


def test_every_kind_of_problem_occurs():
    wanted = [
        *LAYOUTS, *DTYPES, "dim 16", "dim 40", "v_dim 16", "v_dim 24", "no mask", "mask", "a key head each",
        "one key head", "grouped heads", "scale by default", "scale 0", "scale > 0", "scale < 0",
        "a mask for each batch element and head", "one mask for the batch", "lengths",
    ]  # fmt: skip
    assert_occur(PROBLEMS, features_of_problem, wanted)

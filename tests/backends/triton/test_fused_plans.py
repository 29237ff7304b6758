import dataclasses
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, attention, clear_caches, masks
from sparseflash.backends.triton.launcher import Launch
from sparseflash.backends.triton.schedule import fused, longest_first
from sparseflash.backends.triton.schedule import plan as planning
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.schedule.worklists import full_first
from sparseflash.blockmask import csr, streams
from tests.backends.triton.plans import plan
from tests.compared.closeness import NAMES
from tests.compared.exactness import check, results
from tests.compiling.uninterpreted import python
from tests.drawn.counts import examples_times
from tests.drawn.dynamic_masks import dynamic_problems, made_dynamic
from tests.drawn.masks import SEEDS, block_masks
from tests.watched.waiting import NoWaiting

HEADS = 4


def by(way):
    return mock.patch.object(planning, "_DEVICES", ["cpu", "cuda"] if way == "kernels" else [])


def worklists(mask, way, *, axes=(0, 1), batch=1, kv_heads=HEADS, tile=16):
    mask = dataclasses.replace(mask, indices=mask.indices.view(-1))
    with by(way):
        made = plan(mask, batch, HEADS, kv_heads)
        return [made.worklist(axis, tile) for axis in axes]


def assert_same(ours, theirs):
    for axis, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for name in ("index", "tile", "words", "work"):
            x, y = getattr(a, name), getattr(b, name)
            assert x.dtype == y.dtype and torch.equal(x, y), f"{name} over axis {axis}"
        assert (a.parts, a.merged) == (b.parts, b.merged) == (0, None)


def assert_planned_alike(mask, **arguments):
    with mock.patch.object(planning, "full_first", side_effect=AssertionError("operations")):
        ours = worklists(mask, "kernels", **arguments)
    assert_same(ours, worklists(mask, "operations", **arguments))


@pytest.mark.parametrize("few", [longest_first._FEW, 0], ids=["few", "many"])
@given(block_masks(130, blocks=(16, 32), batch=2, heads=HEADS), SEEDS, st.sampled_from([1, 2, 4]))
def test_kernels_plan_what_operations_plan(few, mask, seed, kv_heads):
    with mock.patch.object(longest_first, "_FEW", few):
        assert_planned_alike(made_dynamic(mask, seed), batch=2, kv_heads=kv_heads)


@given(
    block_masks(130, blocks=(16, 32), batch=2, heads=HEADS), SEEDS,
    st.sampled_from([(16, 2), (32, 4), (fused._ROWS, fused._COLUMNS)]),
)  # fmt: skip
def test_one_kernel_lists_the_columns_that_operations_sort(mask, seed, at_once):
    mask = made_dynamic(mask, seed)
    arrays, tiling = (mask.indptr, mask.indices, mask.tile), Tiling(mask.block_k, mask.block_q)
    clear_caches()  # a launch has one _ROWS and one _COLUMNS
    with mock.patch.object(fused, "_ROWS", at_once[0]), mock.patch.object(fused, "_COLUMNS", at_once[1]):
        ours = fused.columns_full_first(*arrays, mask.words, mask.blocks, tiling)
    theirs = full_first(*csr.columns_of(*arrays, *mask.blocks), mask.words, tiling)
    clear_caches()
    for name in ("start", "full", "count", "index", "tile", "words"):
        x, y = getattr(ours, name), getattr(theirs, name)
        assert x.dtype == y.dtype and torch.equal(x, y), name


@pytest.mark.parametrize(("limit", "most"), [("_MOST_PAIRS", None), ("_MOST_PAIRS", 1), ("_MOST_ROWS", 6)])
def test_columns_of_very_thin_or_long_masks_are_sorted(limit, most):
    mask = made_dynamic(masks.local(100, window=30, block=16), seed=0)
    sorts = mock.patch.object(planning, "columns_of", side_effect=AssertionError("sorted"))
    with mock.patch.object(fused, limit, most or getattr(fused, limit)):
        assert_planned_alike(mask)
        mask = made_dynamic(masks.local(100, window=30, block=16), seed=1)
        with by("kernels"), sorts, pytest.raises(AssertionError, match="sorted") if most else nullcontext():
            plan(mask).worklist(1, 16)


def long_rows():
    live = torch.rand(64, 16 * 300, generator=torch.Generator().manual_seed(0)) < 0.9
    live = live | (torch.arange(16 * 300) // 16 % 3 > 0)
    live[:, ::17] = False
    live[16:32] = False
    live[32:48, 16 * 150 :] = True
    return BlockMask.from_dense(live, block=16)


def test_rows_longer_than_a_program_reads_at_a_time():
    mask = made_dynamic(long_rows(), seed=0)
    assert int(mask.indptr.diff().max()) > 2 * fused.AT_ONCE
    assert_planned_alike(mask)


def test_columns_of_more_rows_than_a_program_searches_at_a_time():
    mask = made_dynamic(masks.causal(16 * 150, 16 * 20, block=16, offset=0), seed=0)
    assert int(mask.columns[0].diff().max()) > fused._ROWS
    assert_planned_alike(mask)


def test_more_unused_room_than_a_program_looks_after_at_a_time():
    scores = torch.rand(1, 4, 600, generator=torch.Generator().manual_seed(0))
    mask = masks.mass_blocks(scores, mass=0.1, q_len=64, k_len=9600, block=16)
    room = len(mask.indices) - int(mask.indptr[-1])
    assert room > 4 * 2 * fused.AT_ONCE
    mask.indices[-room:] = torch.arange(room) % 600
    mask.tile[-room:] = torch.arange(room) % 2
    assert_planned_alike(mask)


@pytest.mark.parametrize("block", [16, 32])
def test_patterns_that_batch_elements_and_heads_share_are_read_where_they_lie(block):
    mask = made_dynamic(masks.causal(100, block=block), seed=1)
    for pattern in (mask.pattern, torch.tensor([[1, 0, 1, 1]]), torch.tensor([[1], [0], [1]])):
        each = dataclasses.replace(mask, pattern=pattern.to(torch.int32))
        assert_planned_alike(each, batch=3, kv_heads=2)


def shifted(array):
    found = torch.cat([array.new_zeros(1), array.view(-1)])[1:].view(array.shape)
    assert found.data_ptr() % 16
    return found


def test_arrays_may_begin_at_any_address():
    mask = made_dynamic(masks.local(100, window=30, block=16), seed=0)
    arrays = {name: shifted(getattr(mask, name)) for name in ("indptr", "indices", "tile", "pattern")}
    assert_planned_alike(dataclasses.replace(mask, **arrays))


@given(dynamic_problems(most_tokens=40, most_heads=2, head_dims=(16,), blocks=(16, 32), dtypes=(torch.float16,)))
@examples_times(1 / 5)
def test_attention_with_these_plans_has_the_same_bits_and_is_exact(problem):
    with by("operations"):
        want = results(problem, "triton", "cpu")
    with by("kernels"):
        got = results(problem, "triton", "cpu")
        check(problem, "triton")
    for name in NAMES:
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("few", [longest_first._FEW, 0])
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_and_columns_are_planned_in_two_launches(axis, few):
    mask = made_dynamic(masks.local(100, window=30, block=16), seed=0)
    rule = mock.patch.object(longest_first, "_FEW", few)
    with rule, by("kernels"), mock.patch.object(Launch, "start") as started, NoWaiting() as seen:
        plan(mask, 1, HEADS).worklist(axis, 16)
    assert (started.call_count, seen.started) == (2, 0)


def test_programs_at_a_time_do_not_matter_where_nothing_is_cut():
    with by("kernels"):
        made = plan(made_dynamic(masks.causal(100, block=16), seed=0))
        assert made.worklist(0, 16, resident=2) is made.worklist(0, 16, resident=3)


def test_masks_that_are_not_dynamic_are_planned_by_operations():
    with by("kernels"), mock.patch.object(Launch, "start", side_effect=AssertionError("kernels")):
        plan(masks.causal(100, block=16)).worklist(0, 16)
        with pytest.raises(AssertionError, match="kernels"):
            plan(made_dynamic(masks.causal(100, block=16), seed=0)).worklist(0, 16)


def test_what_has_more_entries_than_kernels_count_is_planned_by_operations():
    mask = made_dynamic(masks.causal(100, block=16), seed=0)
    with by("kernels"), mock.patch.object(planning, "_MOST_ENTRIES", len(mask.indices)):
        assert not plan(mask).lists.fused


def test_a_graph_records_the_kernels_only_once_they_are_loaded():
    recorded = mock.patch.object(streams, "is_capturing", lambda device: True)
    clear_caches()
    with by("kernels"):
        with recorded, pytest.raises(RuntimeError, match="loads its kernels at the first call"):
            plan(made_dynamic(masks.causal(100, block=16), seed=0)).worklist(0, 16)
        plan(made_dynamic(masks.causal(100, block=16), seed=0)).worklist(0, 16)
        with recorded:
            mask = made_dynamic(masks.local(100, window=30, block=16), seed=1)
            ours = plan(mask).worklist(0, 16)
    with by("operations"):
        theirs = plan(dataclasses.replace(mask, indices=mask.indices.view(-1))).worklist(0, 16)
    assert_same([ours], [theirs])


def test_they_are_compiled_for_hopper_and_started_directly():
    source = """
from unittest import mock
from experiments.benchmarks.compile.without_gpu import compiling_for
from sparseflash import masks
from sparseflash.backends.problem import Problem
from sparseflash.backends.triton.direct_start import parameters_of_compiled
from sparseflash.backends.triton.schedule import longest_first, plan
import torch
with mock.patch.object(plan, "_DEVICES", ["cpu"]), compiling_for(90) as compiled:
    for few in (1024, 0):
        longest_first._FEW = few
        for heads in (2, 4):
            mask = masks.top_k_blocks(torch.rand(4, 4), k=2, q_len=60, block=16)
            made = plan.plan_of(Problem.of(mask, scale=1.0), (1, heads), 2, (60, 60))
            made.worklist(0, 16), made.worklist(1, 16)
for name, kernel in compiled:
    assert parameters_of_compiled(kernel, kernel.src.fn.arg_names) is not None, name
print(*sorted({name for name, _ in compiled}), len({kernel.hash for _, kernel in compiled}))
"""
    done = python("-c", source)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["column_kernel", "list_kernel", "work_kernel", str(1 + 1 + 2)]


# ---------------------------------------------------------------------- on a GPU


def chosen(scores, block=64):
    return masks.top_k_blocks(scores, k=5, q_len=block * scores.shape[-2], block=block, causal=True, local_blocks=1)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [7, 70, 700])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_gpu_plans_what_operations_plan(rows, kv_heads):
    scores = torch.rand(2, HEADS, rows, rows, generator=torch.Generator().manual_seed(rows))
    for mask in (chosen(scores), made_dynamic(masks.local(64 * rows, window=500, block=64), seed=rows)):
        mask = mask.to("cuda")
        for each in (mask, dataclasses.replace(mask, indptr=shifted(mask.indptr), tile=shifted(mask.tile))):
            for tile in (64, 32):
                arguments = {"batch": 2, "kv_heads": kv_heads, "tile": tile}
                assert_planned_alike(each, **arguments)


@pytest.mark.gpu
def test_a_cuda_graph_plans_anew_at_every_replay():
    q, k, v = torch.randn(3, 1, HEADS, 1280, 64, device="cuda", dtype=torch.bfloat16).unbind()
    scores = torch.rand(1, HEADS, 20, 20, device="cuda")

    def step():
        mask = chosen(scores)
        work = plan(mask, 1, HEADS).worklist(0, 64)
        return attention(q, k, v, mask), work

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, work = step()
    for seed in range(3):
        scores.copy_(torch.rand(1, HEADS, 20, 20, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        with by("operations"):
            want, theirs = step()
        assert torch.equal(out, want)
        assert_same([work], [theirs])

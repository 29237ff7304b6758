from unittest import mock

import pytest
import torch
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.backends.triton.compile_ahead import Rehearsed
from sparseflash.backends.triton.hopper import backward_pass
from sparseflash.backends.triton.hopper.configs import BLOCK
from sparseflash.backends.triton.launcher import Launch
from sparseflash.backends.triton.persistent import backward_plan, cuts, fused_plan, timeline
from sparseflash.backends.triton.persistent.backward_plan import ITEM_COUNT, items_alone
from sparseflash.backends.triton.schedule.plan import dense_plan
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.schedule.worklists import full_first
from sparseflash.blockmask import csr
from tests.backends.triton.hopper import reference_plan
from tests.backends.triton.hopper.hopper_layouts import LAYOUTS, mask_of
from tests.backends.triton.plans import plan
from tests.compiling.uninterpreted import python
from tests.drawn.counts import examples_times
from tests.drawn.dynamic_masks import made_dynamic
from tests.drawn.masks import SEEDS, block_masks
from tests.watched.waiting import NoWaiting, waiting_raises

ARRAYS = ("start", "work", "entries", "made", "chain", "words", "merged")
AT_ONCE = 16
CUT = cuts.Rule(far=0, worth=0, parts=64, shortest=2)


def columns_of(mask, device="cpu"):
    return full_first(*mask.columns, mask.words, Tiling(mask.block_k, mask.block_q)).to(torch.device(device))


def of_rows(lists, q_len, k_len):
    keys, queries, _ = lists.tiling
    rows, columns = -(-q_len // queries), -(-k_len // keys)
    counted = torch.zeros(len(lists.count) // columns, rows, dtype=torch.int32)
    for number, (start, count) in enumerate(zip(lists.start.tolist(), lists.count.tolist(), strict=True)):
        counted[number // columns, lists.index[start : start + count].long()] += 1
    return counted.view(-1).to(lists.count.device)


def assert_same(ours, theirs):
    for name in ARRAYS:
        x, y = (getattr(each, name).cpu() for each in (ours, theirs))
        if name == "entries":
            assert len(x) >= len(y)
            x = x[: len(y)]
        assert x.dtype == y.dtype and torch.equal(x, y), name
    assert (ours.chains, ours.parts) == (theirs.chains, theirs.parts)


def assert_planned_alike(lists, pattern, kv_heads, q_len, k_len, programs, **how):
    sizes = pattern, kv_heads, q_len, k_len
    ours = fused_plan.backward_plan(lists, of_rows(lists, q_len, k_len), *sizes, programs=programs, **how)
    theirs = reference_plan.backward_plan(lists, *sizes, programs=programs, **how)
    assert_same(ours, theirs)
    assert how or len(ours.entries) == len(theirs.entries)
    return ours


def assert_mask_is_planned_alike(mask, batch=1, heads=1, kv_heads=1, programs=5):
    pattern = mask.pattern.expand(batch, heads)
    return assert_planned_alike(columns_of(mask), pattern, kv_heads, mask.q_len, mask.k_len, programs)


@pytest.fixture(autouse=True)
def few_entries_at_once(request, monkeypatch):
    if request.node.get_closest_marker("gpu") is None:  # a compiled kernel keeps the number
        monkeypatch.setattr(timeline, "AT_ONCE", tl.constexpr(AT_ONCE))


@examples_times(1 / 3)
@given(st.data(), st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 40))
def test_kernels_plan_what_operations_plan(data, batch, kv_heads, group, programs):
    heads = kv_heads * group
    mask = data.draw(block_masks(most_tokens=200, blocks=(16, 32), batch=batch, heads=heads))
    shortest = data.draw(st.sampled_from([None, 1, 2, 5]))
    rule = cuts.RULE if shortest is None else CUT._replace(shortest=shortest)
    band = data.draw(st.sampled_from([backward_plan._BAND, 1, 4]))
    with mock.patch.object(cuts, "RULE", rule), mock.patch.object(backward_plan, "_BAND", band):
        assert_mask_is_planned_alike(mask, batch, heads, kv_heads, programs)


@examples_times(1 / 3)
@given(st.data(), st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 40), SEEDS)
def test_a_mask_made_at_every_step_is_planned_without_waiting(data, batch, kv_heads, group, programs, seed):
    heads = kv_heads * group
    mask = made_dynamic(data.draw(block_masks(most_tokens=200, blocks=(16, 32), batch=batch, heads=heads)), seed)
    columns = csr.columns_of(mask.indptr, mask.indices, mask.tile, *mask.blocks)
    lists = full_first(*columns, mask.words, Tiling(mask.block_k, mask.block_q))
    pattern = mask.pattern.expand(batch, heads)
    made = assert_planned_alike(lists, pattern, kv_heads, mask.q_len, mask.k_len, programs, may_wait=False)
    assert (made.programs, made.parts, len(made.merged)) == (programs, 0, 0)
    assert int(made.chain[-1]) <= made.chains == batch * heads * mask.blocks[0]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (2, 1)])
def test_few_popular_columns_are_cut_alike(heads, kv_heads):
    rows = torch.arange(3 * AT_ONCE + 8)
    layout = (rows[:, None] - rows).abs() <= 1
    layout[:, (0, 33)] = True
    made = assert_mask_is_planned_alike(BlockMask.from_layout(layout, block=16), 1, heads, kv_heads, programs=23)
    assert len(made.merged) == 2 * kv_heads and made.parts > 3 * len(made.merged)
    made = assert_mask_is_planned_alike(masks.dense(16 * len(rows), 32, block=16), 1, heads, kv_heads, programs=40)
    assert len(made.merged) == 2 * kv_heads and len(made.work) == made.parts


@pytest.mark.parametrize("longest", [1, 3])
def test_tiles_with_several_chains(longest):
    with (
        mock.patch.object(backward_plan, "_SHORTEST_CHAIN", longest),
        mock.patch.object(backward_plan, "_LONG_CHAIN", 0),
    ):
        made = assert_mask_is_planned_alike(masks.causal(150, block=16), heads=2, kv_heads=1)
    assert made.chains > 2 * 10


def test_few_queries_of_many_keys_have_a_chain_for_every_so_many_additions_as_a_program_makes():
    made = assert_mask_is_planned_alike(masks.dense(32, 16 * 100, block=16), 1, 2, 2, programs=10)
    assert made.chains == 2 * 2 * 5
    several = masks.dense(32, 16 * 8, block=16)  # not more than four times as many additions to a tile as tiles
    assert assert_mask_is_planned_alike(several, 1, 2, 2, programs=20).chains == 2 * 2


def test_lists_longer_than_what_is_compared_at_a_time_and_empty_ones():
    live = torch.rand(40, 3, generator=torch.Generator().manual_seed(0)) < 0.9
    live[:, 1] = False
    mask = BlockMask.from_dense(live.repeat_interleave(16, 0).repeat_interleave(16, 1), block=16)
    made = assert_mask_is_planned_alike(mask, heads=2, kv_heads=2)
    assert int(made.work[:, 3].max()) > 2 * AT_ONCE


def test_a_mask_without_a_live_tile_has_no_entries():
    made = assert_mask_is_planned_alike(BlockMask.from_layout(torch.zeros(3, 4, dtype=torch.bool), block=16), heads=2)
    assert len(made.entries) == 0 and len(made.work) == 4 and made.chains == 0
    assert all(x.data_ptr() for x in made.walked())  # a kernel is given no array without an address


@pytest.mark.parametrize("band", [1, 7, 16])
def test_lists_of_several_bands(band):
    with mock.patch.object(backward_plan, "_BAND", band), mock.patch.object(backward_plan, "_CLEARLY", 0):
        assert_mask_is_planned_alike(masks.causal(16 * 24, block=16), heads=2, kv_heads=2, programs=12)


def test_tiles_with_more_additions_than_are_compared_at_a_time():
    mask = masks.dense(40, 16 * 40, block=16)
    made = assert_mask_is_planned_alike(mask, programs=40)
    assert len(made.entries) > 3 * 2 * AT_ONCE


def test_more_items_than_one_program_reads_or_ranks_at_a_time():
    layout = torch.rand(30, 50, generator=torch.Generator().manual_seed(0)) < 0.2
    layout[:, 3::16] = True  # long items among those that one program reads at a time, and among the next ones
    mask = BlockMask.from_layout(layout, block=16)
    for rule in (cuts.RULE, CUT, cuts.NEVER):
        fused_plan._kernels.cache_clear()  # a launch has one _AT_ONCE, and one _RANKED
        with mock.patch.multiple(fused_plan, _AT_ONCE=32, _RANKED=2, _RANKING=3), mock.patch.object(cuts, "RULE", rule):
            # 39 items and more are ranked, each among 32 at a time.
            assert_mask_is_planned_alike(mask, heads=2, kv_heads=2, programs=13)
    fused_plan._kernels.cache_clear()


@pytest.mark.parametrize(("least", "first"), [(backward_plan.LEAST, [0, 1]), (0, [20, 40])])
def test_long_items_that_are_little_of_the_work_of_a_program_do_not_come_first(monkeypatch, least, first):
    monkeypatch.setattr(backward_plan, "LEAST", least)
    layout = torch.eye(64, dtype=torch.bool)
    layout[:5, (20, 40)] = True
    made = assert_mask_is_planned_alike(BlockMask.from_layout(layout, block=16), programs=2)
    assert (made.work[made.start[:2].long(), 1] // 16).tolist() == first


def test_lists_that_columns_share():
    made = dense_plan((2, 4), 2, (300, 420), (128, 128), torch.device("cpu"))
    assert_planned_alike(made.lists.get(1, Tiling(*reversed(BLOCK))), made.pattern, 2, 300, 420, 7)


@pytest.mark.parametrize(("name", "programs"), [*((name, 132) for name in sorted(LAYOUTS)), ("global", 264)])
def test_all_programs_of_a_gpu_in_every_order(name, programs):
    mask = BlockMask.from_layout(LAYOUTS[name][:48, :48], block=128)
    assert_mask_is_planned_alike(mask, heads=2 * programs // 132, kv_heads=2 * programs // 132, programs=programs)


def test_it_takes_ten_launches_and_two_operations_and_waits_once():
    mask = masks.causal(400, block=128)
    lists, counted = columns_of(mask), mask.indptr.diff()
    with (
        mock.patch.object(fused_plan, "compile_rehearsed"),
        mock.patch.object(Launch, "start") as started,
        mock.patch.object(torch.Tensor, "tolist", return_value=[4, 0, 0, 10, 4, 5]) as waited,
        NoWaiting() as seen,
    ):
        fused_plan.backward_plan(lists, counted, mask.pattern, 1, 400, 400, programs=132)
    assert (started.call_count, seen.started, waited.call_count) == (10, 2, 1)


def test_where_it_must_not_wait_it_takes_eight_launches_and_one_operation():
    mask = masks.causal(400, block=128)
    lists, counted = columns_of(mask), mask.indptr.diff()
    with (
        mock.patch.object(fused_plan, "compile_rehearsed"),
        mock.patch.object(Launch, "start") as started,
        NoWaiting() as seen,
    ):
        fused_plan.backward_plan(lists, counted, mask.pattern, 1, 400, 400, programs=132, may_wait=False)
    assert (started.call_count, seen.started) == (8, 1)


def test_kernels_assume_the_alignment_only_of_what_always_has_it():
    shifted = {}

    def start(launch, programs, *given):
        function, names = launch.variant.function, launch.variant.names
        assumed = set(names) - set(function.kwargs.get("do_not_specialize_on_alignment") or ())
        numbers = set(function.kwargs.get("do_not_specialize") or ())
        for name, x in zip(names, given, strict=True):
            if isinstance(x, torch.Tensor) and x.data_ptr() % 16:
                shifted.setdefault(function.__name__, set()).update({name} & assumed)
            assert isinstance(x, torch.Tensor) or name.isupper() or name in numbers, name
        launch.variant.launch(programs, list(given))

    with mock.patch.object(Launch, "start", start):
        for blocks in (3, 5, 6):
            mask = masks.causal(16 * blocks, block=16)
            counted = torch.cat([mask.indptr[:1], mask.indptr.diff()])[1:]  # not at a multiple of 16
            fused_plan.backward_plan(columns_of(mask), counted, mask.pattern, 1, mask.q_len, mask.k_len, programs=2)
    assert shifted and not any(shifted.values()), shifted


@pytest.mark.parametrize("may_wait", [True, False])
def test_only_kernels_that_the_plan_starts_are_compiled_ahead(may_wait):
    """Any other would count as new at every plan, whose rehearsal a CUDA graph refuses."""
    mask = masks.causal(400, block=128)
    with (
        mock.patch.object(fused_plan, "compile_rehearsed") as compiled,
        mock.patch.object(Launch, "start", autospec=True) as started,
        mock.patch.object(torch.Tensor, "tolist", return_value=[4, 0, 0, 10, 4, 5]),
    ):
        fused_plan.backward_plan(
            columns_of(mask), mask.indptr.diff(), mask.pattern, 1, 400, 400, programs=132, may_wait=may_wait
        )
    ahead, in_plan = compiled.call_args.args[0], [call.args[0] for call in started.call_args_list]
    assert {id(each) for each in ahead} == {id(each) for each in in_plan} and len(ahead) == len(in_plan)


@pytest.mark.parametrize("may_wait", [True, False])
def test_a_rehearsal_starts_what_the_plan_starts(may_wait):
    """With arguments that the compiler cannot tell from the plan's, or the plan would run kernels made for others."""
    rehearsed, started = [], []

    def kinds(launch, given):
        function = launch.variant.function
        anywhere = function.kwargs.get("do_not_specialize_on_alignment") or ()
        return function.__name__, [
            (x.dtype, name in anywhere or x.data_ptr() % 16 == 0) if isinstance(x, torch.Tensor)
            else x if name.isupper() else type(x)
            for name, x in zip(launch.variant.names, given, strict=True)
        ]  # fmt: skip

    def start(launch, programs, *given):
        started.append(kinds(launch, given))
        launch.variant.launch(programs, list(given))

    def rehearse(stand_in, programs, *given):
        rehearsed.append(kinds(stand_in._launch, given))

    fused_plan._kernels.cache_clear()
    mask = masks.causal(400, block=128)
    with mock.patch.object(Launch, "start", start), mock.patch.object(Rehearsed, "start", rehearse):
        fused_plan.backward_plan(
            columns_of(mask), mask.indptr.diff(), mask.pattern, 1, 400, 400, programs=5, may_wait=may_wait
        )
    assert rehearsed == started and len(started) == (10 if may_wait else 8)


def test_more_items_than_kernels_count_are_refused():
    mask = masks.causal(400, block=128)
    lists, counted, pattern = columns_of(mask), mask.indptr.diff(), mask.pattern.expand(1 << 12, 1 << 10)
    named = r"tiles of keys of all heads must be fewer than 8,388,608 .*; got 16,777,744\. Split .*backend='triton'"
    with pytest.raises(ValueError, match=named):
        fused_plan.backward_plan(lists, counted, pattern, 1 << 10, 400, 400, programs=132)


@examples_times(1 / 3)
@given(st.data(), st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 40), st.booleans())
def test_without_a_gpu_the_items_of_every_program_are_planned_alone(data, batch, kv_heads, group, programs, may_wait):
    heads = kv_heads * group
    mask = data.draw(block_masks(most_tokens=200, blocks=(16, 32), batch=batch, heads=heads))
    pattern, rule = mask.pattern.expand(batch, heads), data.draw(st.sampled_from([cuts.RULE, CUT]))
    how = {"programs": programs, "may_wait": may_wait}
    with mock.patch.object(cuts, "RULE", rule):
        ours = items_alone(columns_of(mask), pattern, kv_heads, mask.k_len, **how)
        whole = reference_plan.backward_plan(columns_of(mask), pattern, kv_heads, mask.q_len, mask.k_len, **how)
    assert torch.equal(ours.start, whole.start)
    assert torch.equal(ours.work[:, ITEM_COUNT.value], whole.work[:, ITEM_COUNT.value])
    assert (ours.parts, len(ours.merged)) == (whole.parts, len(whole.merged))


def test_they_are_compiled_for_hopper_and_started_directly():
    source = """
from unittest import mock
from experiments.benchmarks.compile.without_gpu import compiling_for
from sparseflash import masks
from sparseflash.backends.triton.direct_start import parameters_of_compiled
from sparseflash.backends.triton.persistent import fused_plan
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.schedule.worklists import full_first
import torch
mask = masks.causal(400, block=128)
lists = full_first(*mask.columns, mask.words, Tiling(128, 128))
with mock.patch.object(torch.Tensor, "tolist", lambda self: [4, 0, 0, 10, 4, 5]), compiling_for(90) as compiled:
    for heads in (2, 4):
        fused_plan.backward_plan(lists, mask.indptr.diff(), mask.pattern.expand(2, heads), 2, 400, 400, programs=132)
for name, kernel in compiled:
    assert parameters_of_compiled(kernel, kernel.src.fn.arg_names) is not None, name
    assert ".local" not in kernel.asm["ptx"], name
print(len({name for name, _ in compiled}), len({kernel.hash for _, kernel in compiled}))
"""
    done = python("-c", source)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["10", "10"]


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "programs"), [(2, 132), (4, 132), (4, 264)])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_the_gpu_plans_what_operations_plan(name, kv_heads, programs):
    mask = mask_of(name)
    pattern = mask.pattern.expand(2, 4)
    sizes = kv_heads, mask.q_len, mask.k_len
    counted = mask.indptr.diff().cuda()
    ours = fused_plan.backward_plan(columns_of(mask, "cuda"), counted, pattern.cuda(), *sizes, programs=programs)
    assert_same(ours, reference_plan.backward_plan(columns_of(mask), pattern, *sizes, programs=programs))


@pytest.mark.gpu
def test_calls_on_a_gpu_take_this_plan():
    mask = masks.causal(2048, block=128).to("cuda")
    with mock.patch.object(backward_pass, "items_alone", side_effect=AssertionError("operations")):
        made = backward_pass.planned_backward(plan(mask, 1, 4), 132)
    assert made.programs == 64


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_gpu_plans_masks_made_at_every_step_without_waiting(kv_heads):
    scores = torch.rand(1, kv_heads, 40, 40, generator=torch.Generator().manual_seed(kv_heads))
    arguments = {"k": 7, "q_len": 128 * 40, "block": 128, "causal": True, "local_blocks": 1, "group": 4 // kv_heads}
    made = []
    for device in ("cuda", "cpu"):
        mask = masks.top_k_blocks(scores.to(device), **arguments)
        with waiting_raises() if device == "cuda" else reference_plan.planning():
            made.append(backward_pass.planned_backward(plan(mask, 1, 4, kv_heads), 132))
    assert_same(*made)

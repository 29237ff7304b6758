import heapq
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.backends.problem import Problem
from sparseflash.backends.saved import Saved
from sparseflash.backends.triton.hopper import passes
from sparseflash.backends.triton.persistent import backward_plan, plan
from sparseflash.backends.triton.persistent.dynamic_plan import dynamic_forward_plan
from sparseflash.backends.triton.persistent.plan import forward_plan, start_order
from sparseflash.backends.triton.prepared_call import setting_of
from sparseflash.backends.triton.schedule import plan as planning
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.schedule.worklists import full_first
from sparseflash.blockmask.cache import clear_caches
from tests.backends.triton.hopper import reference_plan
from tests.backends.triton.hopper.hopper_layouts import LAYOUTS, mask_of
from tests.backends.triton.plans import plan as plan_for
from tests.compiling.uninterpreted import python
from tests.drawn.dynamic_masks import made_dynamic
from tests.drawn.masks import SEEDS, block_masks

CUT = plan.Rule(far=0.0, chunk=2, worth=1.0)


def planned(mask, batch, heads, *, programs=132, rule=plan.RULE):
    with mock.patch.object(plan, "RULE", rule):
        lists = full_first(mask.indptr, mask.indices, mask.tile, mask.words, Tiling(mask.block_q, mask.block_k))
        pattern = mask.pattern.expand(batch, heads)
        return forward_plan(lists, pattern, mask.q_len, mask.k_len, programs=programs)


def walked(made):
    """`{number: [(block, tile)]}`, and the parts in order."""
    index, tile, found, parts = made.index.tolist(), made.tile.tolist(), {}, {}
    for number, start, full, count, block, first_tile, part, _ in made.work.tolist():
        entries = list(zip(index[start : start + count], tile[start : start + count], strict=True))
        assert count == len(entries) > 0 and start + count < len(index)
        entries[0] = (block, first_tile)
        assert all(t == 0 for _, t in entries[:full]) and all(t != 0 for _, t in entries[full:])
        parts.setdefault(number, []).append((part, entries))
    for number, chunks in parts.items():
        numbers = [part for part, _ in sorted(chunks)]
        assert numbers in ([0], list(range(numbers[0], numbers[0] + len(numbers)))) and (
            numbers == [0] or numbers[0] > 0
        )
        found[number] = [entry for _, entries in sorted(chunks) for entry in entries]
    return found


@given(st.data())
def test_every_live_tile_of_every_head_is_walked_once_full_ones_first(data):
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    mask = data.draw(block_masks(most_tokens=200, blocks=(16, 32), batch=batch, heads=heads))
    rule = data.draw(st.sampled_from([plan.RULE, CUT]))
    made = planned(mask, batch, heads, rule=rule, programs=data.draw(st.integers(1, 200)))
    rows, pattern = mask.blocks[0], mask.pattern.expand(batch, heads)
    found = walked(made)
    assert sorted(found) == list(range(batch * heads * rows))
    for number, entries in found.items():
        row = int(pattern[number // rows // heads, number // rows % heads]) * rows + number % rows
        of_row = slice(mask.indptr[row], mask.indptr[row + 1])
        stored = list(zip(mask.indices[of_row].tolist(), mask.tile[of_row].tolist(), strict=True))
        expected = [e for e in stored if e[1] == 0] + [e for e in stored if e[1] > 0]
        assert entries == (expected or [(0, -1)])


@given(block_masks(most_tokens=300, blocks=(16, 32)), st.integers(1, 3), st.integers(1, 3))
def test_a_row_is_walked_and_cut_alike_whatever_the_batch_and_the_heads(mask, batch, heads):
    rows = mask.blocks[0]

    def lists_of(made):
        return sorted(
            (n % rows, start, full, count, part > 0) for n, start, full, count, _, _, part, _ in made.work.tolist()
        )

    alone = lists_of(planned(mask, 1, 1, rule=CUT))
    assert lists_of(planned(mask, batch, heads, rule=CUT)) == sorted(alone * (batch * heads))


def test_rows_of_global_tokens_are_cut_and_rows_that_are_alike_are_not():
    assert planned(mask_of("global"), 1, 1).parts == 2 * 4
    assert planned(mask_of("causal"), 1, 1).parts == 0
    assert planned(mask_of("butterfly"), 1, 1).parts == 0


def test_long_rows_of_few_queries_are_cut():
    cases = (
        (1024, 65_536, 4), (1024, 24_576, 1), (16_384, 65_536, 1), (128, 65_536, 4), (128, 25_000, 4), (200, 16_384, 4),
        (128, 4096, 1),
    )  # fmt: skip
    for q_len, k_len, chunks in cases:
        items = planned(masks.dense(q_len, k_len, block=128), 1, 2)
        rows = 2 * -(-q_len // 128)
        assert (len(items.work), items.parts) == (rows * chunks, rows * chunks if chunks > 1 else 0)
        counts = items.work[:, plan.ITEM_COUNT.value]
        assert counts.sum() == rows * -(-k_len // 128) and counts.max() - counts.min() <= 1


@given(st.data(), SEEDS)
def test_a_mask_made_at_every_step_is_walked_alike_but_never_cut(data, seed):
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    mask = made_dynamic(data.draw(block_masks(most_tokens=200, blocks=(16, 32), batch=batch, heads=heads)), seed)
    uncut = plan.RULE._replace(worth=float("inf"))
    wanted = walked(planned(mask, batch, heads, rule=uncut))
    for devices in ([], ["cpu"]):
        with mock.patch.object(planning, "_DEVICES", devices):
            clear_caches()
            of = plan_for(mask, batch, heads)
            listed = of.worklist(0, mask.block_q)
        lists = of.lists.own(0)
        made = dynamic_forward_plan(lists, of.pattern, mask.q_len)
        assert walked(made) == wanted and (made.parts, made.merged) == (0, None)
        assert made.work[:, 0].tolist() == listed.work[:, 0, 0].tolist()
        assert made.words is lists.words
        in_operations = forward_plan(lists, of.pattern, mask.q_len, mask.k_len, programs=132, may_wait=False)
        assert torch.equal(made.work, in_operations.work) and in_operations.parts == 0


def test_the_kernel_that_plans_is_compiled_for_hopper_and_started_directly():
    done = python(
        "-c",
        """
from experiments.benchmarks.compile.without_gpu import compiling_for
from sparseflash import masks
from sparseflash.backends.problem import Problem
from sparseflash.backends.triton.direct_start import parameters_of_compiled
from sparseflash.backends.triton.persistent.dynamic_plan import dynamic_forward_plan
from sparseflash.backends.triton.schedule.plan import plan_of
import torch
with compiling_for(90) as compiled:
    for rows in (4, 600):
        mask = masks.top_k_blocks(torch.rand(rows, rows), k=2, q_len=128 * rows, block=128)
        made = plan_of(Problem.of(mask, scale=1.0), (1, 2), 2, (128 * rows, 128 * rows))
        dynamic_forward_plan(made.lists.own(0), made.pattern, 128 * rows)
for name, kernel in compiled:
    assert parameters_of_compiled(kernel, kernel.src.fn.arg_names) is not None
print(*sorted({name for name, _ in compiled}), len({kernel.hash for _, kernel in compiled}))
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["items_kernel", "2"]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(1, 40))
def test_the_start_order_is_a_permutation(lengths, programs):
    assert sorted(start_order(torch.tensor(lengths), programs).tolist()) == list(range(len(lengths)))


def latest_end(work, programs):
    """When the last program ends, over the mean; a tile takes 1 and each item 1 more."""
    free = [0.0] * programs
    for count in work[:, 3].tolist():
        heapq.heapreplace(free, free[0] + count + 1)
    return max(free) / (sum(free) / programs)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("heads", [8, 16, 32])
def test_programs_are_busy_to_the_end(name, heads):
    made = planned(mask_of(name), 1, heads)
    # Nothing can be better than whole rounds.
    counts = made.work[:, 3]
    rounds = -(-len(counts) // 132) / (len(counts) / 132) if bool((counts == counts[0]).all()) else 1.0
    assert latest_end(made.work, 132) <= max(1.05, rounds * 1.001)


def test_too_many_items_are_refused():
    mask = BlockMask.dense(16, block=16)
    lists = full_first(mask.indptr, mask.indices, mask.tile, mask.words, Tiling(16, 16))
    with pytest.raises(ValueError, match=r"batch x heads x tiles must be below 2\^31; got 65536 x 32768 x 1"):
        forward_plan(lists, mask.pattern.expand(65536, 32768), 16, 16, programs=132)


def prepared(mask, *, merges=False):
    q = torch.empty(1, 2, 512, 64, dtype=torch.bfloat16)
    rule = plan.Rule(far=0.0, chunk=1, worth=1.0) if merges else plan.RULE
    with mock.patch.object(plan, "RULE", rule):
        setting = setting_of(q, q, Problem.of(mask, scale=1.0), (9, 0))
        return (
            passes.forward(setting, "one layout", q, q, q, 1.0, 0),
            passes.backward(setting, "one layout", q, q, q, q, q, 1.0, 0, dlse=False),
        )


def test_a_new_mask_of_the_same_size_costs_only_its_plan():
    clear_caches()
    layouts = [[each.layout for each in prepared(mask)] for mask in (masks.causal(512), masks.dense(512))]
    assert layouts[0] == layouts[1]


def sizes_of_workspace(backward):
    q = torch.empty(1, 2, 512, 64, dtype=torch.bfloat16)
    _, given = backward.layout.given(q, None, Saved(q, q, q, q, q[..., 0], None), None)
    return {name: x.numel() for name, x in given.items() if name in ("rows_ptr", "acc_ptr", "counter_ptr")}


def test_work_of_another_size_has_another_layout():
    clear_caches()
    (forward, backward), (other, _) = prepared(masks.dense(512)), prepared(masks.dense(512), merges=True)
    assert forward.layout.combine is None and other.layout.combine is not None
    with (
        reference_plan.planning(),
        mock.patch.object(backward_plan, "_SHORTEST_CHAIN", 1),
        mock.patch.object(backward_plan, "_LONG_CHAIN", 0),
    ):
        _, several = prepared(masks.dense(512))
    assert sizes_of_workspace(several) != sizes_of_workspace(backward)

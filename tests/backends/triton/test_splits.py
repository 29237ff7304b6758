"""Rows and columns far longer than the rest are cut into chunks: which, and that nothing is lost or done twice."""

import heapq
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutting import chunks_of
from dynamic_masks import made_dynamic
from exactness import FP32_SIZES, check, spread_out
from experiments.benchmarks.speed import patterns
from sparseflash import BlockMask, attention, masks
from sparseflash.backends.triton import launch
from sparseflash.backends.triton.schedule import splits
from sparseflash.backends.triton.schedule.plan import dense_plan, plan_of
from strategies import SEEDS, block_masks
from waiting import NoWaiting


def plan(mask, batch, heads, kv_heads):
    lengths, blocks = (mask.q_len, mask.k_len), (mask.block_q, mask.block_k)
    arrays = mask.indptr, mask.indices, mask.tile, mask.words, mask.pattern
    return plan_of(*arrays, (batch, heads), kv_heads, lengths, blocks)


def fresh(mask):
    """The same mask, never planned before."""
    return BlockMask(*mask._numbers(), *(None if x is None else x.clone() for x in mask._arrays()))


# ---------------------------------------------------------------------- what is cut


def block_counts(side):
    """How many tiles each program of a side walks, and each would if none were cut."""
    sizes, whole = side.work[..., 3].sum(1).tolist(), {}
    for number, size in zip(side.work[:, 0, 0].tolist(), sizes):
        whole[number] = whole.get(number, 0) + size
    return sizes, list(whole.values())


def makespan(sizes, slots=264):
    """The tiles that the busiest of the slots walks, where whichever is idle takes the longest item that is left."""
    busy = [0] * slots
    for size in sorted(sizes, reverse=True):
        heapq.heapreplace(busy, busy[0] + size)
    return max(busy)


def sides(kind, heads, tile, length=16384):
    made = plan(patterns.block_mask(kind, length, 128), 1, heads, heads)
    return made.rows(tile), made.columns(tile)


def test_global_rows_end_with_the_others():
    """The numbers of the table in splits.py: 16 heads of 128 channels, forward tiles of 128 queries."""
    rows, _ = sides("bigbird", 16, 128)
    cut, whole = block_counts(rows)
    assert (len(rows.merged), rows.parts) == (32, 64)
    assert (makespan(whole), makespan(cut)) == (128, 78)


def test_global_rows_and_columns_of_one_head_end_with_the_others():
    for side, want in zip(sides("bigbird", 1, 64), (16, 13), strict=True):
        cut, whole = block_counts(side)
        assert (makespan(whole), makespan(cut)) == (128, want)


@pytest.mark.parametrize(("kind", "heads", "tile"), [("bigbird", 32, 64), ("bigbird", 16, 64)])
def test_a_global_row_is_left_whole_where_there_is_enough_else_to_do(kind, heads, tile):
    for side in sides(kind, heads, tile):
        cut, whole = block_counts(side)
        assert side.parts == 0 and side.merged is None
        assert makespan(whole) <= 1.05 * sum(cut) / 264


@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("kind", ["causal", "dense", "butterfly", "local", "random12"])
def test_lists_that_are_much_alike_are_not_cut(kind, heads):
    for side in sides(kind, heads, 128, length=8192):
        assert side.parts == 0 and side.merged is None
        assert (side.work[..., 7] == 0).all()


def test_the_more_programs_run_at_a_time_the_shorter_the_chunks():
    made = plan(patterns.block_mask("bigbird", 16384, 64), 1, 32, 32)
    assert made.rows(64, resident=3).parts == 0
    cut, whole = block_counts(made.rows(64, resident=4))
    assert (makespan(whole, 528), makespan(cut, 528)) == (256, 158)


def test_few_queries_to_very_many_keys_are_cut():
    made = dense_plan((1, 2), 2, (64, 1 << 18), (128, 128), torch.device("cpu"))
    side = made.rows(64)
    assert side.merged.tolist() == [[0, 0, 128, 0], [1, 128, 128, 0]]  # 16 of the 2048 tiles each
    assert (block_counts(side)[0], side.parts) == ([16] * 256, 256)
    assert made.columns(64).parts == 0


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.sampled_from([1, 4, 264]), st.integers(1, 20))
def test_chunks_are_neither_too_long_nor_too_many(sizes, slots, fewest):
    sizes = torch.tensor(sizes)
    chunks = splits._chunks(sizes, slots, fewest)
    is_cut = chunks > 1
    assert int(chunks[is_cut].sum()) <= slots + int(is_cut.sum())
    if is_cut.any():
        mean = -(-int(sizes.sum()) // slots)
        assert int((-(-sizes // chunks)).max()) <= max(mean, fewest)
        assert int(sizes.max()) > 1.5 * max(mean, fewest)
        assert int((sizes // chunks)[is_cut].min()) * 2 >= max(mean, fewest)


# ---------------------------------------------------------------------- the work items


def lists_of(side, pieces):
    """`{(number, member of the group): [(block, tile id)]}`, the chunks of an item one after the other."""
    found = {}
    for item in sorted(pieces, key=lambda item: item[0][7]):
        for member, (number, start, full, count, first_full, first_masked, first_tile, _) in enumerate(item):
            entries = list(zip(side.index.tolist()[start : start + count], side.tile.tolist()[start : start + count]))
            assert 0 <= full <= count
            assert all(t == 0 for _, t in entries[:full]) and all(t > 0 for _, t in entries[full:])
            if full:
                assert first_full == entries[0][0]
            if full < count:
                assert (first_masked, first_tile) == entries[full]
            found.setdefault((number, member), []).extend(entries)
    return found


@given(block_masks(most_tokens=130, blocks=(16, 32), batch=2, heads=4), st.sampled_from([1, 2, 4]), st.integers(1, 5))
def test_chunks_cover_each_list_once_and_whole_items_are_as_they_were(mask, kv_heads, tiles):
    with chunks_of(None):
        whole = plan(fresh(mask), 2, 4, kv_heads)
        whole = whole.rows(16), whole.columns(16)
    with chunks_of(16 * tiles):
        made = plan(fresh(mask), 2, 4, kv_heads)
        made = made.rows(16), made.columns(16)
    for axis, (before, after) in enumerate(zip(whole, made, strict=True)):
        other = (mask.block_k, mask.block_q)[axis]
        most = -(-16 * tiles // other)
        group = 1 if axis == 0 else 4 // kv_heads
        assert before.parts == 0 and before.merged is None and (before.work[..., 7] == 0).all()
        items = after.work.tolist()
        assert lists_of(before, before.work.tolist()) == lists_of(after, items)

        sizes = [sum(one[3] for one in item) for item in items]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) <= most
        uncut = {item[0][0]: item for item in items if item[0][7] == 0}
        of_before = {item[0][0]: item for item in before.work.tolist()}
        assert all(of_before[number] == item for number, item in uncut.items())

        places = {item[0][7]: item[0][0] for item in items if item[0][7] > 0}
        assert all(len({one[7] for one in item}) == 1 == len({one[0] for one in item}) for item in items)
        assert sorted(places) == list(range(1, after.parts + 1))
        assert group == len(items[0])
        merged = [] if after.merged is None else after.merged.tolist()
        assert sum(count for _, _, count, _ in merged) == after.parts
        for number, first, count, _ in merged:
            assert count == -(-sum(one[3] for one in of_before[number]) // most) > 1
            assert {places.pop(first + i + 1) for i in range(count)} == {number}


def test_a_plan_is_the_same_every_time():
    mask = patterns.block_mask("bigbird", 16384, 128)
    first, second = (plan(fresh(mask), 1, 4, 2).columns(64) for _ in range(2))
    assert first.parts > 0
    for a, b in ((first.work, second.work), (first.merged, second.merged)):
        assert torch.equal(a, b)


# ---------------------------------------------------------------------- what planning asks the device


@contextmanager
def copies_counted():
    """How often numbers come from a tensor to the host."""
    copies = []
    tolist = torch.Tensor.tolist
    with mock.patch.object(torch.Tensor, "tolist", lambda x: copies.append(x.numel()) or tolist(x)):
        yield copies


def test_cutting_costs_one_copy_of_two_numbers_a_side():
    made = plan(patterns.block_mask("bigbird", 16384, 128), 1, 1, 1)
    with copies_counted() as copies:
        assert made.rows(128).parts > 0
        assert made.columns(64).parts > 0
        made.rows(128), made.columns(64)
    assert copies == [2, 2]


@pytest.mark.parametrize(
    ("kind", "length", "heads"), [("butterfly", 16384, 32), ("causal", 16384, 16), ("bigbird", 1536, 1)]
)
def test_nothing_is_asked_where_nothing_can_be_cut(kind, length, heads):
    mask = patterns.block_mask(kind, length, 128)
    with NoWaiting(), copies_counted() as copies:
        made = plan(mask, 1, heads, heads)
        made.rows(128), made.columns(64)
    assert copies == []


@given(block_masks(most_tokens=130, blocks=(16,), batch=2, heads=2), SEEDS)
@settings(max_examples=10)
def test_dynamic_masks_are_not_cut_and_not_waited_for(mask, seed):
    dynamic = made_dynamic(mask, seed)
    with chunks_of(16), NoWaiting(), copies_counted() as copies:
        made = plan(dynamic, 2, 2, 1)
        assert made.rows(16).parts == made.columns(16).parts == 0
    assert copies == []


# ---------------------------------------------------------------------- attention


@contextmanager
def merges_counted():
    """The names of the kernels that merged parts."""
    names = []
    run = launch.Prepared.run

    def counted(self, *arguments):
        names.append(self._kernel.__name__)
        return run(self, *arguments)

    with mock.patch.object(launch.Prepared, "run", counted):
        yield [names]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_all_passes_are_exact_in_chunks(dtype):
    """Full and partial tiles, a ragged end, empty rows, padding and grouped heads; and every pass has been cut."""
    with chunks_of(64), merges_counted() as (names,):
        check(spread_out(16, dtype, **FP32_SIZES), "triton")
    merges = [name for name in names if name.startswith("combine")]
    means = ["combine_means_kernel"] if dtype == torch.float32 else []
    assert merges == ["combine_rows_kernel", *means, *["combine_gradients_kernel"] * 2]


def test_lengths_may_change_from_call_to_call():
    """Some chunks lie past the length then, and give nothing to the merge."""
    layout = torch.eye(4, dtype=torch.bool)
    layout[1] = True
    layout[:, 2] = True
    base = BlockMask.from_layout(layout, block=16, q_len=61, k_len=61)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, 61, 16, generator=generator).requires_grad_() for _ in range(3))
    with chunks_of(16):
        for lengths in ([61, 40], [0, 17]):
            mask = base.with_lengths(torch.tensor(lengths))
            results = []
            for backend in ("triton", "reference"):
                out, lse = attention(q, k, v, mask, return_lse=True, backend=backend)
                live = lse.isfinite()
                gradients = torch.autograd.grad(out.float().sum() + lse[live].sum(), (q, k, v))
                results.append((out, lse, *gradients))
            for got, want in zip(*results, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    (made,) = (x for x in base.indices._sparseflash.values() if hasattr(x, "rows"))
    assert made.launches and all(launched.side.parts > 0 for launched in made.launches.values())


def test_the_bits_do_not_depend_on_what_else_was_run():
    """Parts lie in memory that was used before; what a merge reads has all been written."""
    mask = masks.causal(64, block=16)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 64, 16, generator=generator).requires_grad_() for _ in range(3))

    def results():
        out = attention(q, k, v, mask, backend="triton")
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    empty = torch.empty

    def filled(*arguments, **options):
        return empty(*arguments, **options).fill_(np.nan)

    with chunks_of(16):
        first = results()
        with mock.patch.object(torch, "empty", filled):
            second = results()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)

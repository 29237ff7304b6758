import heapq
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.benchmarks.speed import patterns
from sparseflash import BlockMask, attention, masks
from sparseflash.backends.triton import launcher
from sparseflash.backends.triton.schedule import splits
from sparseflash.backends.triton.schedule.plan import dense_plan
from sparseflash.backends.triton.schedule.splits import SPLITS
from tests.backends.triton.plans import chunks_of, kernels_of, plan
from tests.compared.exactness import FP32_SIZES, check, spread_out
from tests.drawn.dynamic_masks import made_dynamic
from tests.drawn.masks import SEEDS, block_masks
from tests.watched.waiting import NoWaiting


def fresh(mask):
    return BlockMask(*mask._numbers(), *(None if x is None else x.clone() for x in mask._arrays()))


# ---------------------------------------------------------------------- what is cut


def block_counts(side):
    sizes, whole = side.work[..., 3].sum(1).tolist(), {}
    for number, size in zip(side.work[:, 0, 0].tolist(), sizes):
        whole[number] = whole.get(number, 0) + size
    return sizes, list(whole.values())


def makespan(sizes, slots=264):
    busy = [0] * slots
    for size in sorted(sizes, reverse=True):
        heapq.heapreplace(busy, busy[0] + size)
    return max(busy)


def sides(kind, heads, tile, length=16384):
    made = plan(patterns.block_mask(kind, length, 128), 1, heads)
    return made.worklist(0, tile), made.worklist(1, tile)


@pytest.mark.parametrize("heads", [1, 16, 64])
def test_global_rows_end_with_the_others(heads):
    """A longest row of 128 tiles would still run when all others are done."""
    rows, _ = sides("bigbird", heads, 128)
    cut, whole = block_counts(rows)
    assert rows.parts == 8 * heads and len(rows.merged) == 2 * heads
    assert max(whole) == 128 and max(cut) == 32
    assert makespan(cut) <= max(1.05 * sum(cut) / 264, 32)


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("kind", ["bigbird", "causal", "dense", "butterfly", "random12"])
def test_what_is_cut_does_not_depend_on_how_many_heads_there_are(kind, tile):
    """So the bits of a row do not depend on it either."""
    mask = patterns.block_mask(kind, 16384, 128)
    for axis in (0, 1):
        lists = []
        for batch, heads in ((1, 1), (3, 2), (8, 64)):
            side = plan(fresh(mask), batch, heads).worklist(axis, tile)
            count = 16384 // tile
            items = side.work[:, 0]
            lists.append(sorted(items[items[:, 0] // count == 0, :7].tolist()))
        assert lists[0] == lists[1] == lists[2]


def test_each_head_is_cut_as_if_it_were_alone():
    bigbird, causal = (patterns.block_mask(kind, 16384, 128) for kind in ("bigbird", "causal"))
    together = plan(masks.per_head([causal, bigbird, causal]), 1, 3).worklist(0, 128)
    alone = plan(fresh(bigbird), 1, 1).worklist(0, 128)
    count = 128
    second = [item[0] for item in together.work.tolist() if item[0][0] // count == 1]
    assert sorted((n % count, size) for n, _, _, size, *_ in second) == sorted(
        (n, size) for ((n, _, _, size, *_),) in alone.work.tolist()
    )
    assert together.parts == alone.parts > 0


@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("kind", ["causal", "dense", "butterfly", "local", "random12"])
@pytest.mark.parametrize("length", [4096, 8192, 16384])
def test_lists_that_are_much_alike_are_not_cut(kind, heads, length):
    for side in sides(kind, heads, 128, length):
        assert side.parts == 0 and side.merged is None
        assert (side.work[..., 7] == 0).all()


def test_the_more_programs_run_at_a_time_the_shorter_the_chunks():
    made = plan(patterns.block_mask("bigbird", 16384, 64), 1, 32)
    longest = [max(block_counts(made.worklist(0, 64, resident=resident))[0]) for resident in (1, 2, 4)]
    assert longest == sorted(longest, reverse=True) and longest[0] > longest[2]


def test_few_queries_to_very_many_keys_are_cut():
    made = dense_plan((1, 2), 2, (64, 1 << 18), (128, 128), torch.device("cpu"))
    side = made.worklist(0, 64)
    (first, _, chunks, _), (second, start, again, _) = side.merged.tolist()
    assert (first, second, chunks) == (0, 1, again) and start == chunks == side.parts // 2
    assert max(block_counts(side)[0]) <= 64 < 2048
    assert made.worklist(1, 64).parts == 0


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.sampled_from([1, 4, 264]), st.integers(1, 20))
def test_chunks_are_neither_too_long_nor_too_many(sizes, slots, fewest):
    sizes = torch.tensor(sizes)
    (chunks,) = splits._chunks(sizes[None], slots, fewest, SPLITS)
    is_cut = chunks > 1
    assert int(chunks[is_cut].sum()) <= slots + int(is_cut.sum())
    if is_cut.any():
        mean = -(-int(sizes.sum()) // slots)
        assert int((-(-sizes // chunks)).max()) <= max(mean, fewest)
        assert int(sizes.max()) > 1.5 * max(mean, fewest)
        assert int((sizes // chunks)[is_cut].min()) * 2 >= max(mean, fewest)


# ---------------------------------------------------------------------- the work items


def lists_of(side, pieces):
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
        whole = whole.worklist(0, 16), whole.worklist(1, 16)
    with chunks_of(16 * tiles):
        made = plan(fresh(mask), 2, 4, kv_heads)
        made = made.worklist(0, 16), made.worklist(1, 16)
    for axis, (before, after) in enumerate(zip(whole, made, strict=True)):
        other = (mask.block_k, mask.block_q)[axis]
        most = -(-16 * tiles // other)
        group = 1 if axis == 0 else 4 // kv_heads
        assert before.parts == 0 and before.merged is None and (before.work[..., 7] == 0).all()
        items = after.work.tolist()
        assert lists_of(before, before.work.tolist()) == lists_of(after, items)

        sizes = [sum(one[3] for one in item) for item in items]
        # An item without a tile counts as one with one.
        assert sizes == sorted(sizes, key=lambda size: max(size, 1), reverse=True)
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
    first, second = (plan(fresh(mask), 1, 4, 2).worklist(1, 64) for _ in range(2))
    assert first.parts > 0
    for a, b in ((first.work, second.work), (first.merged, second.merged)):
        assert torch.equal(a, b)


# ---------------------------------------------------------------------- what planning asks the device


@contextmanager
def copies_counted():
    copies = []
    tolist = torch.Tensor.tolist
    with mock.patch.object(torch.Tensor, "tolist", lambda x: copies.append(x.numel()) or tolist(x)):
        yield copies


def test_cutting_costs_one_copy_of_two_numbers_a_side():
    made = plan(patterns.block_mask("bigbird", 16384, 128))
    with copies_counted() as copies:
        assert made.worklist(0, 128).parts > 0
        assert made.worklist(1, 64).parts > 0
        made.worklist(0, 128), made.worklist(1, 64)
    assert copies == [2, 2]


@pytest.mark.parametrize(
    ("kind", "length", "heads"), [("butterfly", 1536, 32), ("causal", 1536, 16), ("bigbird", 1536, 1)]
)
def test_nothing_is_asked_where_nothing_can_be_cut(kind, length, heads):
    mask = patterns.block_mask(kind, length, 128)
    with NoWaiting(), copies_counted() as copies:
        made = plan(mask, 1, heads)
        made.worklist(0, 128), made.worklist(1, 64)
    assert copies == []


@given(block_masks(most_tokens=130, blocks=(16,), batch=2, heads=2), SEEDS)
@settings(max_examples=10)
def test_dynamic_masks_are_not_cut_and_not_waited_for(mask, seed):
    dynamic = made_dynamic(mask, seed)
    with chunks_of(16), NoWaiting(), copies_counted() as copies:
        made = plan(dynamic, 2, 2, 1)
        assert made.worklist(0, 16).parts == made.worklist(1, 16).parts == 0
    assert copies == []


# ---------------------------------------------------------------------- attention


@contextmanager
def launches_noted():
    names = []
    start = launcher.Launch.start

    def noted(self, *arguments):
        names.append(self.variant.function.__name__)
        return start(self, *arguments)

    with mock.patch.object(launcher.Launch, "start", noted):
        yield names


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_all_passes_are_exact_in_chunks(dtype):
    with chunks_of(64), launches_noted() as names:
        check(spread_out(16, dtype, **FP32_SIZES), "triton")
    merges = [name for name in names if name.startswith("combine")]
    means = ["combine_means_kernel"] if dtype == torch.float32 else []
    assert merges == ["combine_rows_kernel", *means, *["combine_gradients_kernel"] * 2]


def test_lengths_may_change_from_call_to_call():
    """Chunks past the length give nothing to the merge."""
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
        kernels = kernels_of(base)
    assert len(kernels) == 4 and all(kernel.work.parts > 0 for kernel in kernels.values())


def test_the_bits_do_not_depend_on_what_else_was_run():
    """A merge must read only written values."""
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

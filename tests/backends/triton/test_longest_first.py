import heapq
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import triton.language as tl
from hypothesis import example, given
from hypothesis import strategies as st

from experiments.benchmarks.speed import patterns
from sparseflash import BlockMask, clear_caches, masks
from sparseflash.backends.triton.schedule import longest_first
from sparseflash.backends.triton.schedule import plan as planning
from sparseflash.backends.triton.schedule.fused import Listed, work_in_start_order
from sparseflash.backends.triton.schedule.longest_first import start_order
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.schedule.work_item import ITEM_COUNT, ITEM_NUMBER
from tests.backends.triton.plans import plan
from tests.drawn.masks import SEEDS

FEW = pytest.mark.parametrize("few", [longest_first._FEW, 0], ids=["few", "many"])
HALF_OCTAVES = [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 22, 24, 45, 48, 90, 96, 181, 192, 362, 384]


def highest_bits(length, few):
    """The power of two and the highest bits that decide the order."""
    length = max(length, 1)
    power = length.bit_length() - 1
    return power, (length << 4 if few else length << 1) >> power


def test_of_no_items_there_is_an_order():
    order = longest_first.order_of(torch.zeros(0, 4, dtype=torch.int32), (0, 4, 1), 256, 128, 128)
    assert (order.items, order.programs) == (0, 0)


@FEW
@given(st.lists(st.integers(0, 2**20), min_size=1, max_size=50))
@example(HALF_OCTAVES)
@example([31, 32, 33, 34, 63, 64, 67, 68])
def test_lengths_with_the_same_highest_bits_count_as_equal(few, lengths):
    want = sorted(range(len(lengths)), key=lambda i: [-x for x in highest_bits(lengths[i], few)])
    with mock.patch.object(longest_first, "_FEW", few):
        assert start_order(torch.tensor(lengths)).tolist() == want


def test_of_many_programs_those_of_similar_length_stay_in_the_order_of_heads():
    lengths = torch.tensor([16, 300, 0, 17, 1]).repeat(400)
    order = start_order(lengths)
    of_16_and_17 = [i for i in range(2000) if i % 5 in (0, 3)]
    assert order[:400].tolist() == list(range(1, 2000, 5)) and order[400:1200].tolist() == of_16_and_17
    few = start_order(lengths[:1000])
    assert few[200:400].tolist() == list(range(3, 1000, 5))


@pytest.mark.parametrize("kind", ["random12", "causal", "bigbird"])
def test_programs_of_similar_length_first_come_end_with_the_others(kind):
    lengths = patterns.block_mask(kind, 16384, 128).indptr.diff().repeat_interleave(2).repeat(32)
    busy = [0] * 396
    for length in lengths[start_order(lengths)].tolist():
        heapq.heapreplace(busy, busy[0] + length)
    assert max(busy) <= 1.03 * int(lengths.sum()) / 396


@contextmanager
def a_few_at_a_time(at_once=16, programs=3, counted=32):
    clear_caches()  # a launch has one AT_ONCE
    with mock.patch.multiple(longest_first, AT_ONCE=at_once, _PROGRAMS=programs, _COUNTED=tl.constexpr(counted)):
        try:
            yield
        finally:
            clear_caches()


def placed(counts, pattern, shape, length, tile, held):
    """The numbers of the items in the order in which kernels place them, and their lengths."""
    nothing = torch.zeros_like(counts)
    lists = Listed(nothing, nothing, counts, nothing[:2], nothing[:2], Tiling(held, 16))
    work = work_in_start_order(lists, pattern, shape, length, tile)
    return work[:, 0, ITEM_NUMBER.value].tolist(), work[..., ITEM_COUNT.value].sum(1)


LENGTHS = st.sampled_from([0, 1, 2, 3, 9, 16, 17, 24, 31, 32, 33, 300, 2**24 - 1, 2**24, 2**31 - 1])


@FEW
@given(st.data(), st.integers(1, 3), st.integers(1, 40))
@example(None, 2, 33)
def test_kernels_place_items_in_this_order(few, data, heads, rows):
    if data is None:
        counts = [i * i % 37 for i in range(heads * rows)]
    else:
        counts = data.draw(st.lists(LENGTHS, min_size=heads * rows, max_size=heads * rows))
    counts = torch.tensor(counts, dtype=torch.int32)
    pattern = torch.arange(heads, dtype=torch.int32).view(1, -1)
    with mock.patch.object(longest_first, "_FEW", few), a_few_at_a_time():
        numbers, lengths = placed(counts, pattern, (1, heads, 1), 16 * rows, 16, 16)
        assert numbers == start_order(counts).tolist()
    assert sorted(numbers) == list(range(heads * rows))
    assert torch.equal(lengths, counts[numbers])
    # Longest first; where lengths count as equal, by their numbers.
    keys = [[*(-x for x in highest_bits(n, few)), i] for n, i in zip(lengths.tolist(), numbers) if n < 2**24]
    assert keys == sorted(keys)


@given(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.sampled_from([(16, 16), (16, 32), (8, 32)]), SEEDS)
def test_an_item_is_as_long_as_the_lists_of_its_group(batch, kv_heads, group, sizes, seed):
    (tile, held), length, generator = sizes, 100, torch.Generator().manual_seed(seed)
    rows, tiles, heads = -(-length // held), -(-length // tile), kv_heads * group
    counts = torch.randint(0, 40, (3 * rows,), generator=generator, dtype=torch.int32)
    pattern = torch.randint(0, 3, (batch, heads), generator=generator, dtype=torch.int32)
    row = torch.arange(tiles) * tile // held
    want = counts[(pattern.view(batch, kv_heads, 1, group) * rows + row[:, None]).long()].sum(-1).view(-1)
    with a_few_at_a_time():
        numbers, lengths = placed(counts, pattern, (batch, kv_heads, group), length, tile, held)
    assert numbers == start_order(want).tolist() and torch.equal(lengths, want[numbers])


def test_what_is_counted_and_placed_at_a_time_does_not_matter():
    counts = torch.randint(0, 99, (5 * 60,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    pattern = torch.arange(5, dtype=torch.int32).view(1, -1)
    want = start_order(counts).tolist()
    for at_a_time in ((16, 1, 16), (64, 2, 32), (32, 128, 512), (64, 128, 2048), (128, 3, 64)):
        with a_few_at_a_time(*at_a_time):
            assert placed(counts, pattern, (1, 5, 1), 16 * 60, 16, 16)[0] == want


def test_a_plan_made_on_the_host_has_this_order():
    mask = masks.causal(16 * 70, block=16)
    with mock.patch.object(planning, "_items", side_effect=AssertionError("operations")):
        work = plan(mask, 1, 2, 2).worklist(0, 16).work
    assert work[:, 0, ITEM_NUMBER.value].tolist() == start_order(mask.indptr.diff().repeat(2)).tolist()


def test_a_plan_made_on_the_host_has_items_without_a_tile():
    lengths = [0, 3, 1, 0, 2]
    mask = BlockMask.from_layout(torch.arange(5) < torch.tensor(lengths)[:, None], block=16)
    with mock.patch.object(planning, "_items", side_effect=AssertionError("operations")):
        work = plan(mask, 1, 1, 1).worklist(0, 16).work
    assert work[:, 0, ITEM_NUMBER.value].tolist() == [1, 4, 0, 2, 3]


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("rows", [1, 100, 500, 3000, 17_000])
def test_a_gpu_places_items_in_this_order(rows, group):
    generator = torch.Generator().manual_seed(rows)
    counts = torch.randint(0, 200, (4 * group * rows,), generator=generator, dtype=torch.int32).cuda()
    pattern = torch.randperm(4 * group, generator=generator).int().view(1, -1).cuda()
    row = pattern.view(4, 1, group) * rows + torch.arange(rows, device="cuda")[:, None]
    want = counts[row.long()].sum(-1).view(-1)
    numbers, lengths = placed(counts, pattern, (1, 4, group), 16 * rows, 16, 16)
    assert numbers == start_order(want).tolist() and torch.equal(lengths, want[numbers])

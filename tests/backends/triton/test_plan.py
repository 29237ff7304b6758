import contextlib
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.backends.triton.architecture import architecture_of
from sparseflash.backends.triton.overrides import NEVER_SPLIT, override
from sparseflash.backends.triton.portable.fitting import config_for
from sparseflash.backends.triton.schedule import plan as planning
from sparseflash.backends.triton.schedule import retiling, worklists
from sparseflash.backends.triton.schedule.plan import dense_plan
from sparseflash.blockmask import csr
from sparseflash.blockmask.cache import clear_caches, mask_cache
from tests.backends.triton.plans import plan
from tests.drawn.dynamic_masks import made_dynamic
from tests.drawn.masks import block_masks


def walked(side, heads, count):
    found = {}
    for item in side.work.tolist():
        for member, (number, start, full, total, first_full, first_masked, first_tile, _) in enumerate(item):
            at = (number // count // heads, number // count % heads, number % count, member)
            assert at not in found, "a work item twice"
            entries = list(zip(side.index.tolist()[start : start + total], side.tile.tolist()[start : start + total]))
            assert all(t == 0 for _, t in entries[:full])
            assert all(t > 0 for _, t in entries[full:])
            if full:
                assert first_full == entries[0][0]
            if full < total:
                assert (first_masked, first_tile) == entries[full]
            found[at] = entries
    return found


@given(st.data())
def test_rows_and_columns_walk_every_live_tile_once(data):
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 2, 4]))
    kv_heads = data.draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0]))
    assert_walked_once(
        data.draw(block_masks(most_tokens=130, blocks=(16, 32), batch=batch, heads=heads)), batch, heads, kv_heads
    )


def assert_walked_once(mask, batch, heads, kv_heads):
    pattern = mask.pattern.expand(batch, heads)
    made = plan(mask, batch, heads, kv_heads)
    tiles_of = {}
    row_blocks = mask.blocks[0]
    for p in range((len(mask.indptr) - 1) // row_blocks):
        for i in range(row_blocks):
            for e in range(mask.indptr[p * row_blocks + i], mask.indptr[p * row_blocks + i + 1]):
                tiles_of.setdefault(p, []).append((i, int(mask.indices[e]), int(mask.tile[e])))

    tile = 16
    count = -(-mask.q_len // tile)
    with override(splits=NEVER_SPLIT):
        by_rows, by_columns = made.worklist(0, tile), made.worklist(1, tile)
    rows = walked(by_rows, heads, count)
    for b in range(batch):
        for h in range(heads):
            for t in range(count):
                live = tiles_of.get(int(pattern[b, h]), [])
                want = [(j, kind) for i, j, kind in live if i == t * tile // mask.block_q]
                assert sorted(rows[b, h, t, 0]) == sorted(want)
    assert len(rows) == batch * heads * count

    count, group = -(-mask.k_len // tile), heads // kv_heads
    columns = walked(by_columns, kv_heads, count)
    for b in range(batch):
        for h in range(heads):
            for t in range(count):
                live = tiles_of.get(int(pattern[b, h]), [])
                want = [(i, kind) for i, j, kind in live if j == t * tile // mask.block_k]
                assert sorted(columns[b, h // group, t, h % group]) == sorted(want)
    assert len(columns) == batch * heads * count


@given(block_masks(most_tokens=200, blocks=(16,), heads=4))
@example(BlockMask.from_function(lambda b, h, q, k: (q < 16) & (k == 0), 17, batch=1, heads=4, block=16))
def test_work_is_sorted_over_all_heads_longest_first(mask):
    made = plan(mask, 1, 4, 2)
    for side in (made.worklist(0, 16), made.worklist(1, 16)):
        lengths = side.work[..., 3].sum(1).clamp(min=1)  # an item without a tile counts as one with one
        assert (lengths.diff() <= 0).all()


def test_items_are_numbered_in_31_bits():
    worklists.check_number_of_items(1, 1, 2**31 - 1)
    for sizes in ((1, 1, 2**31), (2, 2**10, 2**20), (2**16, 2**16, 1)):
        shown = " x ".join(map(str, sizes))
        with pytest.raises(ValueError, match=rf"batch x heads x tiles must be below 2\^31; got {shown}"):
            worklists.check_number_of_items(*sizes)


def test_work_of_equal_length_stays_in_the_order_of_heads():
    work = plan(masks.causal(64, block=16), 1, 3, 3).worklist(0, 16).work
    assert work[:, 0, 0].tolist() == [3, 7, 11, 2, 6, 10, 1, 5, 9, 0, 4, 8]


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (128, 256), (200, 300), (129, 128), (127, 640)])
def test_the_dense_plan_is_that_of_the_dense_mask(q_len, k_len):
    mask = BlockMask.dense(q_len, k_len)
    stored, listed = plan(mask, 2, 4, 2), dense_plan((2, 4), 2, (q_len, k_len), (128, 128), torch.device("cpu"))
    for axis in (0, 1):
        ours, theirs = listed.worklist(axis, 64), stored.worklist(axis, 64)
        length, heads = (q_len, 4) if axis == 0 else (k_len, 2)
        count = -(-length // 64)
        a, b = (walked(x, heads, count) for x in (ours, theirs))

        def live(x, entries):
            words = x.words.view(-1, 128, 4)
            return {j: None if t == 0 else words[t - 1].tolist() for j, t in entries}

        assert {at: live(ours, e) for at, e in a.items()} == {at: live(theirs, e) for at, e in b.items()}


def test_a_forward_alone_plans_no_columns():
    mask = masks.causal(300, block=64)
    made = plan(mask, 1, 2)
    with mock.patch.object(planning, "columns_of", side_effect=AssertionError("columns")):
        made.worklist(0, 64)
        with pytest.raises(AssertionError, match="columns"):
            made.worklist(1, 64)
    assert plan(mask, 1, 2) is made
    assert len(made.worklist(1, 64).work) == 2 * 5


@given(block_masks(most_tokens=130, blocks=(16, 32), batch=2, heads=4), st.sampled_from([1, 2, 4]))
def test_a_mask_from_the_host_is_planned_there_with_the_same_result(mask, kv_heads):
    moved = BlockMask(*mask._numbers(), *(None if x is None else x.clone() for x in mask._arrays()))
    mask_cache(moved.indices)["host"] = mask._padded(None)
    for axis in (0, 1):
        ours, theirs = (plan(each, 2, 4, kv_heads).worklist(axis, 16) for each in (moved, mask))
        for name in ("work", "index", "tile", "words", "merged"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert (a is None and b is None) or torch.equal(a, b)
        assert ours.words.data_ptr() == moved.words.data_ptr()  # the bits are on the device once


@given(
    block_masks(most_tokens=130, blocks=(16, 32), batch=2, heads=4), st.sampled_from([1, 2, 4]),
    st.none() | st.integers(0, 99),
)  # fmt: skip
@example(masks.random_blocks(2100, count=2, block=16, seed=1), 1, None)  # more items than are sorted exactly
def test_numpy_plans_as_operations_do(mask, kv_heads, seed):
    if seed is not None:
        mask = made_dynamic(mask, seed)
    found = []
    for on_host in (True, False):
        with contextlib.ExitStack() as stack:
            for of in (csr, worklists, planning, retiling):
                stack.enter_context(mock.patch.object(of, "are_on_host", return_value=on_host))
            clear_caches()
            made = plan(mask, 2, 4, kv_heads)
            lists = [made.worklist(axis, tile) for axis, tile in ((0, 16), (1, 16), (0, mask.block_q))]
            counts = []
            if seed is None:
                other = made.lists.retiling
                for axis in (0, 1):
                    counts += [other.count(axis, each) for each in other.candidates(axis, (64, 64), (64, 64))]
        found.append((lists, counts))
    (ours, our_counts), (theirs, their_counts) = found
    assert our_counts == their_counts
    for one, other in zip(ours, theirs, strict=True):
        for name in ("work", "index", "tile", "words", "merged"):
            a, b = getattr(one, name), getattr(other, name)
            assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


def test_what_is_planned_on_the_host_is_copied_once_for_each_worklist():
    mask = masks.causal(300, block=64)
    moved = BlockMask(*mask._numbers(), *(None if x is None else x.clone() for x in mask._arrays()))
    mask_cache(moved.indices)["host"] = mask
    made = plan(moved, 2, 4)
    with mock.patch.object(worklists, "to_device", wraps=worklists.to_device) as copied:
        for axis in (0, 1):
            made.worklist(axis, 64).to(torch.device("meta"))
    assert copied.call_count == 2


def test_the_dense_plan_stores_nothing_that_grows_with_the_matrix():
    made = dense_plan((1, 1), 1, (1 << 20, 1 << 20), (128, 128), torch.device("cpu"))
    arrays = [
        made.worklist(0, 128).work,
        made.worklist(0, 128).index,
        made.worklist(0, 128).tile,
        made.worklist(1, 128).work,
    ]
    assert sum(a.numel() for a in arrays) < 40 * (1 << 13)


def test_more_work_items_than_an_int_counts_are_refused():
    with pytest.raises(ValueError, match=r"batch x heads x tiles must be below 2\^31; got 70000 x 64 x 512"):
        dense_plan((70_000, 64), 64, (8192, 16), (128, 128), torch.device("meta")).worklist(0, 16)


# ---------------------------------------------------------------------- configurations


CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


@pytest.mark.parametrize("descriptors", [True, False])
def test_a_b200_has_tables_of_its_own(descriptors):
    """With the sizes of an H100, until they are measured."""
    hopper, blackwell = (architecture_of(each).tables.of(descriptors) for each in ((9, 0), (10, 0)))
    assert blackwell == hopper and blackwell is not hopper


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("arithmetic", ["half", "tf32", "fp32"])
def test_every_head_dim_and_block_has_a_configuration_that_its_mask_can_be_cut_into(capability, arithmetic):
    for kernel in ("forward", "dk_dv", "dq"):
        for padded in (16, 32, 64, 128, 256):
            for block_q in (16, 32, 64, 128, 256):
                for block_k in (16, 32, 64, 128, 256):
                    for descriptors in (False, True):
                        config = config_for(
                            kernel, architecture_of(capability), arithmetic, padded, (block_q, block_k), descriptors
                        )
                        assert block_q % config.block_m == 0
                        assert block_k % config.block_n == 0
                        assert min(config.block_m, config.block_n) >= 16
                        assert config.block_n in (16, 32, 64, 128, 256)
                        assert config.num_warps in (1, 2, 4, 8)
                        assert config.num_stages >= 1

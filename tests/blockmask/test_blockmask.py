import copy
import dataclasses
import pickle
import time
import tracemalloc

import pytest
import torch
from hypothesis import given

from sparseflash import BlockMask, masks
from sparseflash.blockmask import bitmask, csr
from tests.blockmask.mask_values import ARRAYS, MANY, MOST, assert_same, dense_with_block, window
from tests.drawn.masks import block_masks
from tests.watched.largest_tensor import LargestTensor

# ---------------------------------------------------------------------- density, columns


@MANY
@given(block_masks(MOST, batch=2, heads=3))
def test_density_is_the_mean_of_the_dense_mask(mask):
    assert mask.density == pytest.approx(mask.to_dense().double().mean().item(), abs=1e-12)
    assert mask.density == mask.density


def test_density_with_lengths_is_the_mean_of_the_live_scores():
    mask = masks.local(300, window=70, block=16).with_lengths(torch.tensor([0, 5, 150, 299, 300]))
    assert mask.density == pytest.approx(mask.to_dense().double().mean().item(), abs=1e-12)


def test_density_of_a_batch_of_nothing_is_zero():
    assert BlockMask.dense(64, block=16).with_lengths(torch.zeros(0, dtype=torch.int64)).density == 0.0


@MANY
@given(dense_with_block())
def test_columns_are_the_rows_of_the_transposed_mask(drawn):
    dense, block = drawn
    mask = BlockMask.from_dense(dense, block=block)
    transposed = BlockMask.from_dense(dense.mT, block=block[::-1])
    assert torch.equal(mask.pattern, transposed.pattern)
    indptr, indices, tile = mask.columns
    assert torch.equal(indptr, transposed.indptr)
    assert torch.equal(indices, transposed.indices)
    assert torch.equal(tile == 0, transposed.tile == 0)
    partial = tile > 0
    mine = bitmask.unpack(mask.bits[tile[partial].long() - 1], block[1])
    theirs = bitmask.unpack(transposed.bits[transposed.tile[partial].long() - 1], block[0])
    assert torch.equal(mine.mT, theirs)


@MANY
@given(block_masks(MOST, batch=2, heads=3))
def test_transposing_twice_gives_the_rows_back(mask):
    again = csr.columns_of(*mask.columns, *mask.blocks[::-1])
    for mine, twice in zip((mask.indptr, mask.indices, mask.tile), again):
        assert twice.dtype == torch.int32
        assert torch.equal(mine, twice)


@pytest.mark.parametrize("columns", [16_383, 20_000, 40_000])
@pytest.mark.parametrize("unused", [0, 2])
def test_columns_of_very_many(columns, unused):
    indices = torch.tensor([0, columns // 2, columns - 1] + unused * [columns - 1], dtype=torch.int32)
    indptr, tile = torch.tensor([0, 1, 3], dtype=torch.int32), torch.arange(len(indices), dtype=torch.int32)
    starts, rows, tiles = csr.columns_of(indptr, indices, tile, 2, columns)
    assert len(starts) == columns + 1 and starts.diff().nonzero().view(-1).tolist() == indices[:3].tolist()
    assert rows.tolist() == [0, 1, 1] + unused * [0] and tiles.tolist() == [0, 1, 2] + unused * [0]


def test_columns_are_derived_once_and_shared_by_masks_that_differ_in_lengths_only():
    mask = window()
    padded = mask.with_lengths(torch.tensor([3, 40]))
    assert mask.columns is mask.columns
    assert padded.columns is mask.columns
    assert padded.with_lengths(torch.tensor([1])).columns is mask.columns


@pytest.mark.parametrize("first", ["derived from", "untouched"])
def test_masks_with_some_arrays_in_common_derive_their_own(first):
    causal = torch.ones(64, 64, dtype=torch.bool).tril()
    mask = BlockMask.from_dense(torch.stack([causal, causal.T]), block=16)
    if first == "derived from":
        assert len(mask.columns) == 3 and mask.density > 0.5 and hash(mask)
    full = dataclasses.replace(mask, tile=torch.zeros_like(mask.tile), bits=mask.bits[:0])
    one = dataclasses.replace(mask, pattern=torch.tensor([[0, 1, 0, 0]], dtype=torch.int32))
    for other in (mask, full, one):
        assert other.density == pytest.approx(other.to_dense().double().mean().item())
        assert_same(other, BlockMask.from_dense(other.to_dense(), block=16))
    assert full.columns[2].tolist() == [0] * 20
    assert mask.columns[2].tolist() != [0] * 20
    assert full != mask and one != mask


# ---------------------------------------------------------------------- a value: equal, hashed, copied, moved, printed


def masks_unlike_the_window():
    mask = window()
    dense = mask.to_dense()[0, 0]
    flipped = dense.clone()
    flipped[39, 0] ^= True
    return {
        "one score": BlockMask.from_dense(flipped, block=16),
        "block": BlockMask.from_dense(dense, block=32),
        "block of keys": BlockMask.from_dense(dense, block=(16, 32)),
        "query length": BlockMask.from_dense(torch.cat([dense, dense[:1] & False]), block=16),
        "key length": BlockMask.from_dense(torch.cat([dense, dense[:, :1] & False], 1), block=16),
        "heads": BlockMask.from_dense(dense.expand(2, 40, 40), block=16),
        "batch": BlockMask.from_dense(dense.expand(2, 1, 40, 40), block=16),
        "lengths": mask.with_lengths(torch.tensor([40])),
        "no score": BlockMask.from_dense(dense & False, block=16),
    }


@pytest.mark.parametrize("difference", masks_unlike_the_window())
def test_masks_that_differ_are_not_equal(difference):
    mask, other = window(), masks_unlike_the_window()[difference]
    assert mask != other and other != mask
    assert hash(mask) != hash(other)


def test_masks_that_differ_in_lengths_are_not_equal():
    one, two = window().with_lengths(torch.tensor([3])), window().with_lengths(torch.tensor([4]))
    assert one != two and hash(one) != hash(two)
    assert_same(one, window().with_lengths(torch.tensor([3], dtype=torch.int32)))


@MANY
@given(block_masks(40, blocks=(16,)), block_masks(40, blocks=(16,)))
def test_masks_are_equal_just_when_shape_and_scores_are(mask, other):
    same = mask.shape == other.shape and torch.equal(mask.to_dense(), other.to_dense())
    if mask.lengths is None and other.lengths is None:
        assert (mask == other) == same
    elif mask == other:
        assert same


def test_a_mask_equals_nothing_but_masks():
    assert window() != "mask" and window() is not None and window() != window().to_dense()[0, 0].tolist()
    assert window().__eq__(3) is NotImplemented


def test_a_mask_has_no_truth_value():
    near, far = BlockMask.dense(32, block=16), BlockMask.dense(32, block=32)
    for use in (lambda: near and far, lambda: not near, lambda: bool(near), lambda: near or far):
        with pytest.raises(TypeError, match=r"masks must be combined by &, \| and ~; got one where Python needs True"):
            use()


def test_masks_are_not_added_or_multiplied():
    near = BlockMask.dense(32, block=16)
    for use in (lambda: near + near, lambda: near * 0.5, lambda: sum([near, near]), lambda: torch.zeros(32, 32) + near):
        with pytest.raises(TypeError, match=r"must not be added or multiplied: combine masks with &, \| and ~\.$"):
            use()


def test_equal_masks_are_one_key():
    assert len({window(), window(), BlockMask.from_dense(window().to_dense(), block=16)}) == 1


@given(block_masks(MOST, batch=2, heads=3))
def test_a_pickled_mask_comes_back_equal(mask):
    back = pickle.loads(pickle.dumps(mask))
    assert_same(back, mask)
    assert torch.equal(back.to_dense(), mask.to_dense())


@pytest.mark.parametrize("is_view", [False, True])
def test_a_mask_goes_to_a_new_process(tmp_path, is_view):
    mask = masks.causal(300, block=64).with_lengths(torch.tensor([200, 300]))
    if is_view:
        mask = dataclasses.replace(mask, indices=torch.cat([mask.indices, mask.indices])[: len(mask.indices)])
    process = torch.multiprocessing.get_context("spawn").Process(
        target=BlockMask.save, args=(mask, tmp_path / "arrived")
    )
    process.start()
    process.join()
    assert BlockMask.load(tmp_path / "arrived") == mask


def test_a_view_of_a_larger_array_is_pickled_alone():
    mask = masks.causal(300, block=64)
    view = torch.cat([mask.indices, torch.zeros(100_000, dtype=torch.int32)])[: len(mask.indices)]
    mask = dataclasses.replace(mask, indices=view)
    assert len(pickle.dumps(mask)) < 20_000
    assert pickle.loads(pickle.dumps(mask)) == mask


def test_a_mask_without_contents_is_shown_by_its_shapes():
    assert repr(window().to("meta")) == "BlockMask(40 x 40, blocks of 16, 7 tiles, meta)"
    dynamic = masks.top_k_blocks(torch.ones(2, 2), k=1, q_len=40, k_len=40, block=32).to("meta")
    assert repr(dynamic) == "BlockMask(40 x 40, blocks of 32, room for 2 tiles, meta, dynamic)"


@pytest.mark.parametrize("use", [hash, BlockMask.canonical, BlockMask.transpose, lambda mask: mask == window()])
def test_a_mask_without_contents_says_so_where_they_are_asked_for(use):
    with pytest.raises(ValueError, match="device that holds its contents; got the meta device"):
        use(window().to("meta"))


def test_what_is_derived_from_a_mask_is_not_pickled_with_it():
    mask = window()
    before = len(pickle.dumps(mask))
    assert len(mask.columns) == 3 and mask.density > 0 and hash(mask)
    assert len(pickle.dumps(mask)) == before
    back = pickle.loads(pickle.dumps(mask))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(back.columns, mask.columns))


def test_copies_are_the_mask_itself():
    mask = window()
    assert copy.copy(mask) is mask
    assert copy.deepcopy({"mask": mask})["mask"] is mask


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(BlockMask)])
def test_fields_cannot_be_assigned_or_deleted(name):
    mask = window()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(mask, name, getattr(mask, name))
    with pytest.raises(dataclasses.FrozenInstanceError):
        delattr(mask, name)


def test_moving_a_mask_moves_every_array():
    mask = window().with_lengths(torch.tensor([3, 40]))
    assert mask.to("cpu") is mask and mask.to(torch.device("cpu"), non_blocking=True) is mask
    moved = mask.to("meta", non_blocking=True)
    assert moved.device == torch.device("meta")
    for name in (*ARRAYS, "words"):
        assert getattr(moved, name).device == torch.device("meta")
        assert getattr(moved, name).shape == getattr(mask, name).shape
    assert moved.shape == mask.shape
    assert window().to("meta").lengths is None


def test_nbytes_counts_the_arrays():
    mask = masks.causal(64, block=16)
    assert mask.nbytes == 4 * (5 + 10 + 10 + 16 + 1)
    assert mask.with_lengths(torch.tensor([3, 4])).nbytes == mask.nbytes + 4 * 2 * 2


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (
            BlockMask.dense(64, block=16),
            "BlockMask(64 x 64, blocks of 16, 16 tiles: 16 full + 0 partial, density 100 %)",
        ),
        (
            masks.causal(64, 96, block=(16, 32)),
            "BlockMask(64 x 96, blocks of 16 x 32, 10 tiles: 6 full + 4 partial (2 distinct), density 67.2 %)",
        ),
        (
            BlockMask.from_layout(torch.eye(2, dtype=torch.bool).expand(3, 4, 2, 2), block=16),
            "BlockMask(32 x 32, blocks of 16, 2 tiles: 2 full + 0 partial, density 50 %, "
            "1 pattern for 3 x 4 (batch x heads))",
        ),
        (
            BlockMask.dense(64, block=32).with_lengths(torch.tensor([32, 0])),
            "BlockMask(64 x 64, blocks of 32, 4 tiles: 4 full + 0 partial, density 100 %, "
            "cut by the lengths of 2 sequences: density 12.5 %)",
        ),
    ],
    ids=["full", "rectangular", "heads", "lengths"],
)
def test_repr_sums_the_mask_up(mask, text):
    assert repr(mask) == text


def test_words_are_the_bits_or_a_dead_tile():
    mask = window()
    assert torch.equal(mask.words, mask.bits.reshape(-1))
    assert BlockMask.dense(64, block=64).words.tolist() == [0] * (64 * 2)


# ---------------------------------------------------------------------- documentation


@pytest.mark.parametrize("name", sorted(name for name in vars(BlockMask) if not name.startswith("_")))
def test_what_users_see_of_a_mask_is_documented_with_an_example(name):
    found = vars(BlockMask)[name]
    if name in {each.name for each in dataclasses.fields(BlockMask)}:
        return
    assert ">>>" in found.__doc__
    if not isinstance(found, property):
        method = getattr(BlockMask, name)
        assert (method.__module__, method.__qualname__) == ("sparseflash.blockmask.mask", f"BlockMask.{name}")
        assert pickle.loads(pickle.dumps(method)) == method


# ---------------------------------------------------------------------- long sequences


@pytest.mark.parametrize(
    "build",
    [
        lambda: masks.local(2**20, window=4096),
        lambda: masks.local(2**20, window=4096, causal=True),
        lambda: masks.butterfly(2**20),
        lambda: masks.butterfly(2**20, causal=True),
    ],
    ids=["local", "causal local", "butterfly", "causal butterfly"],
)
def test_a_million_tokens_take_under_a_second_and_16_megabytes(build):
    def seconds():
        start = time.process_time()  # others may be busy
        build()
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 1.0
    with LargestTensor() as largest:
        mask = build()
    assert mask.nbytes < 16e6
    assert largest.nbytes < 16e6
    mask.validate()


@pytest.mark.parametrize(
    ("build", "times"),
    [(masks.causal, 4.5), (masks.dense, 1.5), (lambda n: masks.local(n, window=n // 2, causal=True), 4.5)],
    ids=["causal", "dense", "local"],
)
def test_a_list_of_a_million_tiles_takes_few_times_its_memory(build, times):
    """Peak memory of NumPy, in sizes of the mask."""
    build(1024)
    tracemalloc.start()
    try:
        mask = build(3 * 2**16)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(mask.indices) > 750_000
    assert most < times * mask.nbytes

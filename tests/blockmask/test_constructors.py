import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask
from sparseflash.blockmask import bitmask
from tests.blockmask.mask_values import MANY, MOST, assert_same, dense_with_block, sizes
from tests.drawn.masks import RULES, SEEDS, block_masks, lengths, rule

# ---------------------------------------------------------------------- from_dense, to_dense


@MANY
@given(dense_with_block())
def test_a_dense_mask_survives_the_round_trip(drawn):
    dense, block = drawn
    mask = BlockMask.from_dense(dense, block=block)
    assert torch.equal(mask.to_dense(), dense)
    assert mask.shape == dense.shape
    assert (mask.block_q, mask.block_k) == block
    assert mask.blocks == (math.ceil(dense.shape[2] / block[0]), math.ceil(dense.shape[3] / block[1]))
    assert mask.validate() is mask


@MANY
@given(block_masks(MOST, batch=2, heads=3))
def test_every_constructor_makes_valid_masks(mask):
    assert mask.validate() is mask


def test_leading_dimensions_may_be_left_out():
    dense = torch.rand(3, 40, 50, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = BlockMask.from_dense(dense, block=16)
    assert mask.shape == (1, 3, 40, 50)
    assert_same(mask, BlockMask.from_dense(dense[None], block=16))
    assert_same(BlockMask.from_dense(dense[0], block=16), BlockMask.from_dense(dense[None, :1], block=16))
    layout = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    assert_same(BlockMask.from_layout(layout, block=16), BlockMask.from_layout(layout[None], block=16))
    assert_same(BlockMask.from_layout(layout[0], block=16), BlockMask.from_layout(layout[None, :1], block=16))


def test_dense_masks_may_be_arrays_and_lists_of_any_strides():
    dense = np.tri(40, 50, dtype=bool)
    mask = BlockMask.from_dense(torch.from_numpy(dense), block=16)
    assert_same(BlockMask.from_dense(dense, block=16), mask)
    assert_same(BlockMask.from_dense(dense.tolist(), block=16), mask)
    assert_same(BlockMask.from_dense(dense[::-1, ::-1].copy()[::-1, ::-1], block=16), mask)
    assert_same(BlockMask.from_dense(torch.from_numpy(dense.T.copy()).mT, block=16), mask)
    read_only = dense.copy()
    read_only.flags.writeable = False
    assert_same(BlockMask.from_dense(read_only, block=16), mask)
    everywhere = np.broadcast_to(np.array(True), (40, 50))
    assert_same(BlockMask.from_dense(everywhere, block=16), BlockMask.dense(40, 50, block=16))


def test_a_mask_keeps_nothing_of_what_it_was_made_from():
    dense, layout = torch.ones(40, 40, dtype=torch.bool).tril(), torch.ones(2, 2, dtype=torch.bool)
    rows, cols = torch.tensor([0, 1]), torch.tensor([0, 1])
    made = [
        BlockMask.from_dense(dense, block=16),
        BlockMask.from_layout(layout, block=32, q_len=40, k_len=40),
        BlockMask.from_tiles(rows, cols, 40, block=32),
    ]
    before = [mask.to_dense() for mask in made]
    dense.fill_(False), layout.fill_(False), rows.fill_(0), cols.fill_(0)
    assert all(torch.equal(mask.to_dense(), live) for mask, live in zip(made, before))


# ---------------------------------------------------------------------- one set of scores, one mask


@MANY
@given(dense_with_block(batch=1, heads=1), SEEDS)
def test_tiles_in_any_order_and_any_form_give_the_same_mask(drawn, seed):
    dense, block = drawn
    q_len, k_len = dense.shape[2:]
    rows, cols = math.ceil(q_len / block[0]), math.ceil(k_len / block[1])
    rng = np.random.default_rng(seed)
    padded = torch.from_numpy(rng.random((rows * block[0], cols * block[1])) < 0.5)
    padded[:q_len, :k_len] = dense[0, 0]
    grid = padded.view(rows, block[0], cols, block[1]).transpose(1, 2).reshape(-1, *block)
    order = torch.from_numpy(rng.permutation(rows * cols))
    tile = torch.arange(1, rows * cols + 1)
    tile[grid.all(-1).all(-1) & torch.from_numpy(rng.random(rows * cols) < 0.5)] = 0
    mask = BlockMask.from_tiles(
        (order // cols).int(), order % cols, q_len, k_len, block=block, tile=tile[order].int(), live=grid
    )
    assert_same(mask, BlockMask.from_dense(dense, block=block))


def test_scores_without_tile_numbers_belong_to_the_tiles_in_turn():
    i = torch.arange(4)
    live = torch.rand(4, 64, 64, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = BlockMask.from_tiles(i, i, 256, block=64, live=live)
    assert torch.equal(mask.to_dense()[0, 0], torch.block_diag(*live).bool())
    assert mask == BlockMask.from_tiles(i, i, 256, block=64, tile=i + 1, live=live)


def test_tiles_may_be_lists_and_arrays():
    i, tile = torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2])
    live = torch.stack([torch.ones(16, 16).tril(), torch.ones(16, 16).triu()]).bool()
    expected = BlockMask.from_tiles(i, tile // 2, 32, block=16, tile=tile, live=live)
    rows, cols, numbers = [0, 1, 1], [0, 0, 1], [1, 0, 2]
    assert BlockMask.from_tiles(rows, cols, 32, block=16, tile=numbers, live=live.numpy()) == expected
    made = BlockMask.from_tiles(np.array(rows), cols, 32, block=16, tile=np.array(numbers, np.uint8), live=live)
    assert made == expected
    assert BlockMask.from_tiles(i, cols, 32, block=16) == BlockMask.from_tiles(rows, cols, 32, block=16, tile=[0] * 3)


@MANY
@given(dense_with_block(batch=1, heads=1))
def test_looking_scores_up_gives_the_same_mask(drawn):
    dense, block = drawn
    mask = BlockMask.from_function(lambda q, k: dense[0, 0][q, k], *dense.shape[2:], block=block)
    assert_same(mask, BlockMask.from_dense(dense, block=block))


@MANY
@given(sizes(), st.sampled_from(RULES), st.data())
def test_a_rule_gives_the_same_mask_tile_by_tile_and_as_a_matrix(drawn, name, data):
    q_len, k_len, block = drawn
    live = rule(name, data.draw(lengths(MOST)))
    dense = live(torch.arange(q_len)[:, None], torch.arange(k_len)[None, :]).expand(q_len, k_len)
    mask = BlockMask.from_function(live, q_len, k_len, block=block)
    assert_same(mask, BlockMask.from_dense(dense, block=block))


@MANY
@given(sizes(), st.data(), SEEDS)
def test_a_layout_gives_the_same_mask_as_its_scores(drawn, data, seed):
    q_len, k_len, block = drawn
    share = data.draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    shape = (2, 3, math.ceil(q_len / block[0]), math.ceil(k_len / block[1]))
    layout = torch.from_numpy(np.random.default_rng(seed).random(shape) < share)
    mask = BlockMask.from_layout(layout, block=block, q_len=q_len, k_len=k_len)
    dense = layout.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)[:, :, :q_len, :k_len]
    assert_same(mask, BlockMask.from_dense(dense, block=block))
    assert_same(mask, BlockMask.from_layout(layout.numpy(), block=block, q_len=q_len, k_len=k_len))
    assert mask.to_layout().expand(layout.shape).equal(layout)


@given(block_masks(most_tokens=100, batch=2, heads=2))
def test_the_layout_of_a_mask_has_the_tiles_with_a_live_score(mask):
    dense = mask.to_dense()
    pad = [-size % block for size, block in zip(dense.shape[-2:], (mask.block_q, mask.block_k))]
    padded = torch.nn.functional.pad(dense, (0, pad[1], 0, pad[0]))
    grid = padded.unflatten(-1, (-1, mask.block_k)).unflatten(-3, (-1, mask.block_q))
    layout = mask.to_layout()
    assert layout.expand(*dense.shape[:2], -1, -1).equal(grid.any(-1).any(-2))


def test_a_layout_without_lengths_is_of_whole_blocks():
    mask = BlockMask.from_layout(torch.ones(2, 3, dtype=torch.bool), block=(16, 64))
    assert (mask.q_len, mask.k_len) == (32, 192)
    assert_same(mask, BlockMask.dense(32, 192, block=(16, 64)))


@given(sizes())
def test_dense_keeps_every_score(drawn):
    q_len, k_len, block = drawn
    mask = BlockMask.dense(q_len, k_len, block=block)
    assert_same(mask, BlockMask.from_dense(torch.ones(q_len, k_len, dtype=torch.bool), block=block))
    assert mask.density == 1.0


def test_key_length_is_the_query_length_by_default():
    assert BlockMask.dense(70, block=32).shape == (1, 1, 70, 70)
    assert BlockMask.from_function(lambda q, k: k <= q, 70, block=32).shape == (1, 1, 70, 70)
    zero = torch.tensor([0])
    assert BlockMask.from_tiles(zero, zero, 70, block=32).shape == (1, 1, 70, 70)


def test_blocks_default_to_128_tokens():
    zero = torch.tensor([0])
    for mask in (
        BlockMask.dense(300),
        BlockMask.from_dense(torch.ones(300, 300, dtype=torch.bool)),
        BlockMask.from_layout(torch.ones(3, 3, dtype=torch.bool)),
        BlockMask.from_function(lambda q, k: k <= q, 300),
        BlockMask.from_tiles(zero, zero, 300),
    ):
        assert (mask.block_q, mask.block_k) == (128, 128)


def test_equal_tiles_and_equal_heads_are_stored_once():
    causal = torch.ones(64, 64, dtype=torch.bool).tril()
    other = causal.T
    mask = BlockMask.from_dense(torch.stack([causal, other, causal, other, causal]), block=16)
    assert mask.pattern.tolist() == [[0, 1, 0, 1, 0]]
    assert len(mask.indptr) == 2 * 4 + 1 and len(mask.indices) == 2 * 10
    assert torch.equal(mask.bits, torch.stack([bitmask.pack(causal[:16, :16]), bitmask.pack(other[:16, :16])]))


def test_a_pattern_of_one_head_may_recur_in_another_batch_element():
    near = torch.eye(32, dtype=torch.bool)
    dense = torch.stack([torch.stack([near, ~near]), torch.stack([~near, near]), torch.stack([near, near])])
    mask = BlockMask.from_dense(dense, block=16)
    assert mask.pattern.tolist() == [[0, 1], [1, 0], [0, 0]]
    assert torch.equal(mask.to_dense(), dense)


def test_heads_that_differ_only_in_the_row_of_a_tile_are_distinct():
    layout = torch.zeros(3, 2, 2, dtype=torch.bool)
    layout[0, 0, 1] = layout[1, 1, 1] = layout[2, 0, 1] = True
    mask = BlockMask.from_layout(layout, block=16)
    assert mask.pattern.tolist() == [[0, 1, 0]]
    assert mask.indptr.tolist() == [0, 1, 1, 1, 2] and mask.indices.tolist() == [1, 1]
    mask.validate()


def test_a_mask_without_live_scores_stores_no_tile():
    for mask in (
        BlockMask.from_dense(torch.zeros(2, 40, 50, dtype=torch.bool), block=16),
        BlockMask.from_function(lambda q, k: q < 0, 40, 50, block=16),
        BlockMask.from_tiles(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 40, 50, block=16),
    ):
        assert len(mask.indices) == 0 and len(mask.bits) == 0
        assert mask.density == 0.0 and not mask.to_dense().any()
        assert [len(array) for array in mask.columns] == [5, 0, 0]
        mask.validate()

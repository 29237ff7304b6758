"""`BlockMask`: its constructors agree and are canonical, what derives from it is right, and what is wrong is named."""

import copy
import dataclasses
import inspect
import math
import pickle
import re
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sparseflash import BlockMask, masks
from sparseflash.blockmask import bitmask, csr, rules, stats, validate
from strategies import RULES, SEEDS, block_masks, blocks, dense_masks, lengths, rule

ARRAYS = ("indptr", "indices", "tile", "bits", "pattern", "lengths")
MOST = 150
# These tests take a millisecond or two an example.
MANY = settings(max_examples=4 * settings().max_examples)


@st.composite
def sizes(draw, most=MOST):
    """`(q_len, k_len, block)`, as often square as not."""
    block = draw(blocks())
    q_len = draw(lengths(most, block[0]))
    return q_len, draw(st.just(q_len) | lengths(most, block[1])), block


@st.composite
def dense_with_block(draw, batch=2, heads=3):
    q_len, k_len, block = draw(sizes())
    return draw(dense_masks(q_len, k_len, batch, heads, block)), block


def assert_same(mask, other):
    for name in ARRAYS:
        mine, theirs = getattr(mask, name), getattr(other, name)
        assert (mine is None) == (theirs is None), name
        assert mine is None or torch.equal(mine, theirs), name
    assert mask == other
    assert (mask != other) is False
    assert hash(mask) == hash(other)


def window(length=40, block=16):
    """The mask of the docstring: three block rows, seven partial tiles, four distinct ones."""
    return BlockMask.from_function(lambda q, k: (q - k).abs() <= 1, length, block=block)


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
    # What lies past the ends is anything; `from_tiles` must drop it.
    padded = torch.from_numpy(rng.random((rows * block[0], cols * block[1])) < 0.5)
    padded[:q_len, :k_len] = dense[0, 0]
    grid = padded.view(rows, block[0], cols, block[1]).transpose(1, 2).reshape(-1, *block)
    # All tiles are listed, in any order, dead ones too, equal bits more than once; full ones either way.
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
    # Indexing raises where a position lies past the end.
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


# ---------------------------------------------------------------------- from_function


def test_a_predicate_may_depend_on_queries_or_keys_alone_or_on_nothing():
    q, k = torch.arange(40)[:, None].expand(40, 50), torch.arange(50)[None, :].expand(40, 50)
    for live, dense in (
        (lambda q, k: q % 3 == 0, q % 3 == 0),
        (lambda q, k: k < 20, k < 20),
        (lambda q, k: torch.tensor(True), q >= 0),
        (lambda q, k: True, q >= 0),
    ):
        assert_same(BlockMask.from_function(live, 40, 50, block=16), BlockMask.from_dense(dense, block=16))


class Recorder:
    """A predicate that remembers where it was asked."""

    def __init__(self, live, shape):
        self.live, self.asked, self.sizes = live, torch.zeros(shape, dtype=torch.bool), []

    def __call__(self, q, k):
        assert q.dtype == k.dtype == torch.int64
        answer = self.live(q, k)
        self.sizes.append(answer.numel())
        self.asked[q, k] = True  # raises past the ends
        return answer


@given(sizes())
def test_a_predicate_is_asked_for_every_score_and_none_past_the_ends(drawn):
    q_len, k_len, block = drawn
    live = Recorder(lambda q, k: k <= q, (q_len, k_len))
    BlockMask.from_function(live, q_len, k_len, block=block)
    assert live.asked.all()


@given(sizes(), SEEDS)
def test_candidates_limit_where_a_predicate_is_asked(drawn, seed):
    q_len, k_len, block = drawn
    shape = (math.ceil(q_len / block[0]), math.ceil(k_len / block[1]))
    layout = torch.from_numpy(np.random.default_rng(seed).random(shape) < 0.5)
    inside = layout.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:q_len, :k_len]
    near = (torch.arange(q_len)[:, None] - torch.arange(k_len)).abs() < 20
    for candidates in (layout, layout.numpy(), lambda i, j: layout[i, j], tuple(layout.nonzero().flip(0).T)):
        live = Recorder(lambda q, k: (q - k).abs() < 20, (q_len, k_len))
        mask = BlockMask.from_function(live, q_len, k_len, block=block, candidates=candidates)
        assert torch.equal(live.asked, inside)
        # What is no candidate is dead, whatever the predicate says of it.
        assert_same(mask, BlockMask.from_dense(near & inside, block=block))


def test_candidates_may_depend_on_rows_or_columns_alone():
    q, k = torch.arange(100)[:, None], torch.arange(100)[None, :]
    for candidates, inside in ((lambda i, j: i == 1, q // 32 == 1), (lambda i, j: j > 1, k // 32 > 1)):
        mask = BlockMask.from_function(lambda q, k: k <= q, 100, block=32, candidates=candidates)
        assert_same(mask, BlockMask.from_dense((k <= q) & inside, block=32))


def test_a_predicate_runs_on_the_device_asked_for():
    devices = set()

    def live(q, k):
        devices.update({q.device, k.device})
        return k <= q

    mask = BlockMask.from_function(live, 64, block=16, device="cpu")
    assert devices == {torch.device("cpu")} and mask.device == torch.device("cpu")


@pytest.mark.parametrize(
    "live",
    [
        lambda q, k: 0 <= q - k < 64,
        lambda q, k: k <= q and q - k < 64,
        lambda q, k: not k <= q,
        lambda q, k: max(q, k) < 64,
        lambda q, k: k <= q if q < 64 else k < 64,
        lambda q, k: q.item() > 3,
        lambda q, k: int(q) > 3,
        lambda q, k: math.sqrt(q) > k,
        lambda q, k: ([0] * 256)[q] == k,
        lambda q, k: np.arange(256)[int(k)] < q,
    ],
)
def test_a_rule_for_one_pair_at_a_time_is_refused_with_advice(live):
    with pytest.raises(TypeError, match=r"^live must answer for many pairs at once\. Use &, \| and ~ instead of and"):
        BlockMask.from_function(live, 256)
    with pytest.raises(TypeError, match=r"^candidates must answer for many pairs at once"):
        BlockMask.from_function(lambda q, k: k <= q, 256, block=16, candidates=live)


def test_a_rule_that_returns_nothing_is_told_apart():
    with pytest.raises(TypeError, match=r"^live must return bools, .*; got None: is a `return` missing\?"):
        BlockMask.from_function(lambda q, k: None, 256)


def test_other_errors_of_a_rule_are_its_own():
    with pytest.raises(RuntimeError, match=r"^The size of tensor a"):
        BlockMask.from_function(lambda q, k: q < torch.zeros(3, 5, 7), 256)


@pytest.mark.parametrize(("scores", "pairs"), [(1, 1), (16 * 32 * 3, 7), (10**6, 5), (16 * 32, 10**6)])
def test_borders_of_chunks_leave_no_trace(monkeypatch, scores, pairs):
    live, shape = rule("documents", 37), (200, 230)
    whole = BlockMask.from_function(live, *shape, block=(16, 32))
    monkeypatch.setattr(rules, "SCORES_AT_ONCE", scores)
    monkeypatch.setattr(rules, "_PAIRS_AT_ONCE", pairs)
    chunked = Recorder(live, shape)
    assert_same(BlockMask.from_function(chunked, *shape, block=(16, 32)), whole)
    assert len(chunked.sizes) > 5
    assert max(chunked.sizes) <= max(scores, 16 * 32)


def test_borders_of_chunks_leave_no_trace_in_candidates(monkeypatch):
    layout = masks.butterfly(200, block=16).to_dense()[0, 0, ::16, ::16]
    whole = BlockMask.from_function(rule("near", 90), 200, block=16, candidates=layout)
    monkeypatch.setattr(rules, "_PAIRS_AT_ONCE", 30)  # two block rows
    for candidates in (layout, lambda i, j: layout[i, j], layout.nonzero(as_tuple=True)):
        assert_same(BlockMask.from_function(rule("near", 90), 200, block=16, candidates=candidates), whole)


class LargestTensor(TorchDispatchMode):
    """Measures the largest tensor, in bytes, that any operation makes."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.nbytes = max(self.nbytes, tensor.numel() * tensor.element_size())
        return made


def test_a_predicate_over_many_tokens_takes_bounded_memory():
    asked = []

    def live(q, k):
        answer = k <= q
        asked.append(answer.numel())
        return answer

    with LargestTensor() as largest:
        mask = BlockMask.from_function(live, 8192)
    assert sum(asked) == 8192**2
    assert max(asked) <= rules.SCORES_AT_ONCE == 2**21  # a thirty-second of the matrix
    assert largest.nbytes <= rules.SCORES_AT_ONCE  # the answer
    assert_same(mask, masks.causal(8192))


# ---------------------------------------------------------------------- density, columns


@MANY
@given(block_masks(MOST, batch=2, heads=3))
def test_density_is_the_mean_of_the_dense_mask(mask):
    assert mask.density == pytest.approx(mask.to_dense().double().mean().item(), abs=1e-12)
    assert mask.density == mask.density  # the second time, from the cache


def test_density_with_lengths_is_the_same_in_chunks(monkeypatch):
    mask = masks.local(300, window=70, block=16).with_lengths(torch.tensor([0, 5, 150, 299, 300]))
    monkeypatch.setattr(stats, "SCORES_AT_ONCE", 16 * 16 * 3)
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


# ---------------------------------------------------------------------- with_lengths


@MANY
@given(block_masks(MOST, batch=2, heads=3), st.data())
def test_what_lies_at_or_past_a_length_is_dead(mask, data):
    q_len, k_len = mask.q_len, mask.k_len
    stops = data.draw(st.lists(st.integers(0, 2 * MOST) | st.sampled_from([q_len, k_len]), min_size=2, max_size=2))
    bare = dataclasses.replace(mask, lengths=None)
    padded = mask.with_lengths(torch.tensor(stops))
    stop = torch.tensor(stops).view(2, 1, 1, 1)
    inside = (torch.arange(q_len).view(-1, 1) < stop) & (torch.arange(k_len) < stop)
    assert torch.equal(padded.to_dense(), bare.to_dense() & inside)
    assert padded.shape == (2, *mask.shape[1:])
    assert padded.lengths.tolist() == [[min(stop, n) for stop in stops] for n in (q_len, k_len)]
    padded.validate()


@MANY
@given(block_masks(MOST, batch=2, heads=3), st.data())
def test_queries_and_keys_may_have_lengths_of_their_own(mask, data):
    stops = st.lists(st.integers(0, MOST), min_size=2, max_size=2).map(torch.tensor)
    q_stops, k_stops = data.draw(st.none() | stops), data.draw(stops)
    padded = mask.with_lengths(q_lengths=q_stops, k_lengths=k_stops)
    inside = torch.arange(mask.k_len) < k_stops.view(2, 1, 1, 1)
    if q_stops is not None:
        inside = inside & (torch.arange(mask.q_len).view(-1, 1) < q_stops.view(2, 1, 1, 1))
    assert torch.equal(padded.to_dense(), dataclasses.replace(mask, lengths=None).to_dense() & inside)
    padded.validate()
    baked = padded.bake_lengths()
    assert baked.lengths is None and torch.equal(baked.to_dense(), padded.to_dense())
    assert torch.equal(padded.T.to_dense(), padded.to_dense().mT)


def test_one_number_is_short_for_two():
    mask = window()
    assert mask.with_lengths([20, 30]) == mask.with_lengths(q_lengths=[20, 30], k_lengths=[20, 30])
    assert hash(mask.with_lengths([20])) == hash(mask.with_lengths(q_lengths=[20], k_lengths=[20]))
    assert mask.with_lengths(k_lengths=[20]) != mask.with_lengths([20])


def test_lengths_that_do_not_fit_together_are_refused():
    mask = window()
    with pytest.raises(TypeError, match="lengths must be given alone: it sets q_lengths and k_lengths"):
        mask.with_lengths([3], k_lengths=[3])
    with pytest.raises(TypeError, match="must be given lengths, q_lengths or k_lengths; got none"):
        mask.with_lengths()
    with pytest.raises(ValueError, match=r"must have one batch size; got \[2\] and \[3\]"):
        mask.with_lengths(q_lengths=[3, 4], k_lengths=[3, 4, 5])
    with pytest.raises(ValueError, match=r"k_lengths must have shape \[B\]; got \[1, 1\]"):
        mask.with_lengths(k_lengths=torch.tensor([[3]]))


def test_new_lengths_replace_old_ones():
    mask = window().with_lengths(torch.tensor([3, 7, 9]))
    assert_same(mask.with_lengths(torch.tensor([20, 30])), window().with_lengths(torch.tensor([20, 30])))


def test_lengths_are_clamped_to_what_there_is():
    mask = BlockMask.dense(40, 60, block=16).with_lengths(torch.tensor([-5, 0, 50, 60, 61, 2**40]))
    assert mask.q_lengths.tolist() == [0, 0, 40, 40, 40, 40]
    assert mask.k_lengths.tolist() == [0, 0, 50, 60, 60, 60]


def test_a_mask_with_lengths_shares_the_other_arrays():
    mask = window()
    padded = mask.with_lengths(torch.tensor([3]))
    assert all(getattr(padded, name) is getattr(mask, name) for name in ARRAYS[:-1])
    assert mask.lengths is None


def test_lengths_belong_to_the_mask_alone():
    given_lengths = torch.tensor([3, 40], dtype=torch.int32)
    mask = window().with_lengths(given_lengths)
    given_lengths.fill_(0)
    assert mask.lengths.tolist() == [[3, 40]] * 2


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64])
def test_lengths_may_be_of_any_integer_type(dtype):
    mask = BlockMask.dense(400, block=16).with_lengths(torch.tensor([7, 100], dtype=dtype))
    assert mask.lengths.dtype == torch.int32 and mask.lengths.tolist() == [[7, 100]] * 2
    mask.validate()


def test_lengths_may_be_strided():
    mask = BlockMask.dense(40, block=16)
    assert mask.with_lengths(torch.arange(6)[::2]).lengths.tolist() == [[0, 2, 4]] * 2
    assert mask.with_lengths(torch.tensor([5]).expand(3)).lengths.tolist() == [[5, 5, 5]] * 2


@pytest.mark.parametrize("given_lengths", [[7, 40], (7, 40), np.array([7, 40])], ids=["list", "tuple", "array"])
def test_lengths_may_be_a_list(given_lengths):
    assert_same(window().with_lengths(given_lengths), window().with_lengths(torch.tensor([7, 40])))


def test_giving_lengths_asks_the_device_nothing():
    # Tensors on the meta device have no values, so that reading one raises.
    mask = window().to("meta")
    with pytest.raises(RuntimeError):
        mask.indices.tolist()
    assert mask.with_lengths(torch.zeros(2, dtype=torch.int64, device="meta")).shape == (2, 1, 40, 40)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ([3.0, 4.0], TypeError, "lengths must be a list of integers; got torch.float32"),
        ([True], TypeError, "lengths must be a list of integers; got torch.bool"),
        ([[3]], TypeError, r"lengths must be a list of integers; got torch.int64 of shape \[1, 1\]"),
        (None, TypeError, "with_lengths must be given lengths, q_lengths or k_lengths; got none of them"),
        (3, TypeError, r"lengths must be a list of integers; got torch.int64 of shape \[\]"),
        (torch.tensor([3.0]), TypeError, "lengths must be an integer tensor; got torch.float32"),
        (torch.tensor([True]), TypeError, "lengths must be an integer tensor; got torch.bool"),
        (torch.tensor([3j]), TypeError, "lengths must be an integer tensor; got torch.complex64"),
        (torch.tensor(3), ValueError, r"lengths must have shape \[B\]; got \[\]"),
        (torch.tensor([[3]]), ValueError, r"lengths must have shape \[B\]; got \[1, 1\]"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, "on the mask's device cpu; got meta"),
    ],
)
def test_wrong_lengths_are_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        window().with_lengths(wrong)


def test_lengths_of_another_batch_are_refused():
    near = torch.eye(20, dtype=torch.bool)
    mask = BlockMask.from_dense(torch.stack([near, ~near])[:, None], block=16)
    with pytest.raises(ValueError, match=r"lengths must have shape \[2\]; got \[3\]"):
        mask.with_lengths(torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"lengths must have shape \[2\]; got \[1\]"):
        mask.with_lengths(torch.tensor([1]))


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


def test_equal_masks_are_one_key():
    assert len({window(), window(), BlockMask.from_dense(window().to_dense(), block=16)}) == 1


@given(block_masks(MOST, batch=2, heads=3))
def test_a_pickled_mask_comes_back_equal(mask):
    back = pickle.loads(pickle.dumps(mask))
    assert_same(back, mask)
    assert torch.equal(back.to_dense(), mask.to_dense())


@pytest.mark.parametrize("is_view", [False, True])
def test_a_mask_goes_to_a_new_process(tmp_path, is_view):
    # Arrays travel as file descriptors, which must still be open when the process starts, after all is pickled.
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
    assert mask.to("cpu") is mask and mask.to(torch.device("cpu")) is mask
    moved = mask.to("meta")
    assert moved.device == torch.device("meta")
    for name in (*ARRAYS, "words"):
        assert getattr(moved, name).device == torch.device("meta")
        assert getattr(moved, name).shape == getattr(mask, name).shape
    assert moved.shape == mask.shape
    assert window().to("meta").lengths is None


def test_nbytes_counts_the_arrays():
    mask = masks.causal(64, block=16)
    # 5 row starts, 10 block columns, 10 tile numbers, one tile of 16 words, one pattern number.
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
            "1 patterns for 3 x 4 (batch x heads))",
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
        start = time.process_time()  # of this process alone: others may be busy
        build()
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 1.0
    with LargestTensor() as largest:
        mask = build()
    assert mask.nbytes < 16e6
    assert largest.nbytes < 16e6
    mask.validate()


# ---------------------------------------------------------------------- validate


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def two_patterns():
    """100 x 100 in blocks of 16: a window and its complement."""
    dense = window(100).to_dense()[0]
    return BlockMask.from_dense(torch.cat([dense, ~dense]), block=16)


def changed(array, place, value):
    array = array.clone()
    array[place] = value
    return array


def reordered(mask, order):
    """The same scores with the partial tiles numbered otherwise."""
    order = torch.tensor(order)
    number = torch.cat([torch.zeros(1, dtype=torch.int64), order.argsort() + 1])
    return dataclasses.replace(mask, bits=mask.bits[order], tile=number[mask.tile.long()].int())


def stored_twice():
    """Two heads of one pattern, each with its own copy of it."""
    mask = window()
    return dataclasses.replace(
        mask,
        indptr=int32([*mask.indptr.tolist(), *(mask.indptr + 7).tolist()[1:]]),
        indices=mask.indices.repeat(2),
        tile=mask.tile.repeat(2),
        pattern=int32([[0, 1]]),
    )


def one_tile(row, col):
    """32 x 32 in blocks of 16, one of them full."""
    return BlockMask.from_tiles(torch.tensor([row]), torch.tensor([col]), 32, block=16)


def replace(make=window):
    """`replace()(field=change, ...)`: how to break a mask by changing some of its arrays."""

    def breaker(**changes):
        def broken():
            mask = make()
            return dataclasses.replace(mask, **{name: change(mask) for name, change in changes.items()})

        return broken

    return breaker


# (rule, how it is broken). The window has indptr [0, 2, 5, 7], indices [0, 1, 0, 1, 2, 1, 2] and
# tile [1, 2, 3, 1, 2, 3, 4].
BROKEN = [
    (r"indptr must run from 0 to the 7 stored tiles", replace()(indptr=lambda m: int32([1, 2, 5, 7]))),
    (r"indptr must run from 0 to the 7 stored tiles", replace()(indptr=lambda m: int32([0, 2, 5, 6]))),
    (r"indptr must not decrease", replace()(indptr=lambda m: int32([0, 5, 2, 7]))),
    (r"indices must lie in 0\.\.2", replace()(indices=lambda m: changed(m.indices, 6, 3))),
    (r"indices must lie in 0\.\.2", replace()(indices=lambda m: changed(m.indices, 0, -1))),
    (r"indices must strictly increase in a row", replace()(indices=lambda m: changed(m.indices, 0, 1))),
    (r"indices must strictly increase in a row", replace()(indices=lambda m: int32([1, 0, 0, 1, 2, 1, 2]))),
    (r"tile must lie in 0\.\.4", replace()(tile=lambda m: changed(m.tile, 0, 5))),
    (r"tile must lie in 0\.\.4", replace()(tile=lambda m: changed(m.tile, 0, -1))),
    (r"partial tiles must be numbered as they first appear", lambda: reordered(window(), [1, 0, 2, 3])),
    (r"partial tiles must be numbered as they first appear", replace()(bits=lambda m: torch.cat([m.bits, m.bits[:1]]))),
    (r"a tile with no live score must not be stored", replace()(bits=lambda m: changed(m.bits, 1, 0))),
    (r"a tile with every score live must be tile 0", replace()(bits=lambda m: changed(m.bits, 1, 2**16 - 1))),
    (r"bits past the block must be 0", replace()(bits=lambda m: changed(m.bits, (1, 0, 0), 1 << 20))),
    (r"equal partial tiles must be stored once", replace()(bits=lambda m: changed(m.bits, 1, m.bits[0]))),
    (r"scores past q_len or k_len must be dead", replace()(bits=lambda m: changed(m.bits, (3, 8, 0), 1))),
    (r"scores past q_len or k_len must be dead", replace()(bits=lambda m: changed(m.bits, (3, 0, 0), 1 << 8))),
    (r"scores past q_len or k_len must be dead", replace()(bits=lambda m: changed(m.bits, (3, 15, 0), 1 << 15))),
    (r"scores past q_len or k_len must be dead", replace(lambda: one_tile(1, 0))(q_len=lambda m: 31)),
    (r"scores past q_len or k_len must be dead", replace(lambda: one_tile(0, 1))(k_len=lambda m: 31)),
    (r"pattern must lie in 0\.\.1", replace(two_patterns)(pattern=lambda m: int32([[0, 2]]))),
    (r"pattern must lie in 0\.\.1", replace(two_patterns)(pattern=lambda m: int32([[-1, 1]]))),
    (r"patterns must be numbered as they first appear", replace(two_patterns)(pattern=lambda m: int32([[1, 0]]))),
    (r"patterns must be numbered .* and each one used", replace(two_patterns)(pattern=lambda m: int32([[0, 0]]))),
    (r"equal patterns must be stored once", stored_twice),
    (r"lengths of queries must lie in 0\.\.40", replace()(lengths=lambda m: int32([[3, -1], [3, 3]]))),
    (r"lengths of keys must lie in 0\.\.40", replace()(lengths=lambda m: int32([[3], [41]]))),
]


@pytest.mark.parametrize(("rule", "broken"), BROKEN)
def test_validate_names_the_broken_rule(rule, broken):
    with pytest.raises(ValueError, match=rf"^not a valid BlockMask: {rule}"):
        broken().validate()


def test_every_rule_of_validate_is_broken_above():
    reached = set()
    for _, broken in BROKEN:
        with pytest.raises(ValueError) as error:
            broken().validate()
        reached.add(re.sub(r"\d+", "n", str(error.value)))
    # The first `must(` is its definition.
    assert len(reached) == inspect.getsource(validate.validate).count("must(") - 1


# ---------------------------------------------------------------------- what constructors refuse


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_must_be_int32_tensors(name):
    mask = window().with_lengths(torch.tensor([40]))
    for wrong in (torch.int64, torch.int16, torch.float32):
        with pytest.raises(TypeError, match=f"^{name} must be an int32 tensor; got {wrong}"):
            dataclasses.replace(mask, **{name: getattr(mask, name).to(wrong)})
    with pytest.raises(TypeError, match=f"^{name} must be an int32 tensor; got list"):
        dataclasses.replace(mask, **{name: getattr(mask, name).tolist()})


@pytest.mark.parametrize("name", ["indptr", "tile", "bits", "pattern", "lengths"])
def test_arrays_must_be_on_one_device(name):
    mask = window().with_lengths(torch.tensor([40]))
    with pytest.raises(ValueError, match=f"one device; {name} is on meta, indices are on cpu"):
        dataclasses.replace(mask, **{name: getattr(mask, name).to("meta")})


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_must_be_contiguous(name):
    mask = two_patterns().with_lengths(torch.tensor([40, 30]))
    array = getattr(mask, name)
    strided = torch.stack([array, array], -1)[..., 0]
    with pytest.raises(ValueError, match=rf"^{name} must be contiguous; call \.contiguous\(\) on it"):
        dataclasses.replace(mask, **{name: strided})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indptr": int32([0, 2, 5])}, r"indptr must have P \* 3 \+ 1 entries \(3 block rows .*\); got shape \[3\]"),
        ({"indptr": int32([0, 2, 5, 7, 7])}, r"indptr must have P \* 3 \+ 1 entries"),
        ({"indptr": int32([0])}, r"indptr must have P \* 3 \+ 1 entries"),
        ({"indptr": int32([])}, r"indptr must have P \* 3 \+ 1 entries"),
        ({"indptr": int32([[0, 2, 5, 7]])}, r"indptr must have P \* 3 \+ 1 entries"),
        ({"tile": int32([0] * 6)}, r"indices and tile must have one shape \[nnz\]; got \[7\] and \[6\]"),
        (
            {"tile": int32([[0]]), "indices": int32([[0]])},
            r"indices and tile must have one shape \[nnz\]; got \[1, 1\] and \[1, 1\]",
        ),
        ({"bits": int32([[[0]]])}, r"bits must have shape \[T, 16, 1\]; got \[1, 1, 1\]"),
        ({"bits": int32([0] * 64)}, r"bits must have shape \[T, 16, 1\]; got \[64\]"),
        ({"block_k": 64}, r"bits must have shape \[T, 16, 2\]; got \[4, 16, 1\]"),
        ({"pattern": int32([0])}, r"pattern must have shape \[B or 1, Hq or 1\]; got \[1\]"),
        ({"pattern": int32([[]])}, r"pattern must have shape \[B or 1, Hq or 1\]; got \[1, 0\]"),
        ({"lengths": int32([40])}, r"lengths must have shape \[2, B\] with the pattern's B; got \[1\]"),
        (
            {"lengths": int32([[40] * 3] * 2), "pattern": int32([[0], [0]])},
            r"lengths must have shape \[2, B\] with the pattern's B; got \[2, 3\]",
        ),
        ({"block_q": 17}, r"block must be one of 16, 32, 64, 128, 256, or a tuple of two of them; got \(17, 16\)"),
        ({"q_len": 0}, r"q_len must be between 1 and 2\^31 - 257 tokens; got 0"),
        ({"k_len": 2**31}, r"k_len must be between 1 and 2\^31 - 257 tokens; got 2147483648"),
    ],
    ids=str,
)
def test_arrays_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(window(), **changes)


ZERO = torch.tensor([0])
YES = torch.ones(4, 4, dtype=torch.bool)

BLOCK_TAKERS = {
    "from_dense": lambda block: BlockMask.from_dense(YES, block=block),
    "from_layout": lambda block: BlockMask.from_layout(YES, block=block),
    "from_function": lambda block: BlockMask.from_function(lambda q, k: k <= q, 4, block=block),
    "from_tiles": lambda block: BlockMask.from_tiles(ZERO, ZERO, 4, block=block),
    "dense": lambda block: BlockMask.dense(4, block=block),
}
LENGTH_TAKERS = {
    "from_layout": lambda **lengths: BlockMask.from_layout(YES, **lengths),
    "from_function": lambda **lengths: BlockMask.from_function(lambda q, k: k <= q, **lengths),
    "from_tiles": lambda **lengths: BlockMask.from_tiles(ZERO, ZERO, **lengths),
    "dense": BlockMask.dense,
}


@pytest.mark.parametrize("build", BLOCK_TAKERS.values(), ids=BLOCK_TAKERS)
@pytest.mark.parametrize(
    "block", [0, -16, 8, 100, 512, None, "16", 64.0, [32, 32], (16,), (16, 32, 64), (16, 17)], ids=repr
)
def test_a_block_that_is_none_is_refused(build, block):
    message = f"block must be one of 16, 32, 64, 128, 256, or a tuple of two of them; got {block!r}."
    with pytest.raises(ValueError, match=re.escape(message)):
        build(block)


@pytest.mark.parametrize("build", LENGTH_TAKERS.values(), ids=LENGTH_TAKERS)
@pytest.mark.parametrize("name", ["q_len", "k_len"])
def test_lengths_that_are_none_are_refused(build, name):
    for wrong in (0, -1, 2**31 - 256, 2**40):
        with pytest.raises(ValueError, match=rf"{name} must be between 1 and 2\^31 - 257 tokens; got {wrong}"):
            build(**{"q_len": 512, "k_len": 512, name: wrong})
    for wrong in (True, 1.5, 64.0, "64", math.nan):
        message = f"{name} must be an integer number of tokens; got {wrong!r}"
        with pytest.raises(TypeError, match=re.escape(message)):
            build(**{"q_len": 512, "k_len": 512, name: wrong})


def test_lengths_may_be_integers_of_numpy_and_torch():
    assert_same(BlockMask.dense(np.int32(70), torch.tensor(50), block=32), BlockMask.dense(70, 50, block=32))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: BlockMask.from_dense(torch.ones(4, 4)),
            TypeError,
            r"dense must be boolean .* got torch\.float32\. Compare it: x != 0 if .*, x == 0 if .* -inf is dead",
        ),
        (lambda: BlockMask.from_dense(np.eye(4, dtype=np.uint8)), TypeError, r"dense must be boolean .* torch\.uint8"),
        (lambda: BlockMask.from_dense(YES[0]), ValueError, r"dense must have shape \[Nq, Nk\], .* got \[4\]"),
        (
            lambda: BlockMask.from_dense(YES[None, None, None]),
            ValueError,
            r"dense must have shape .* got \[1, 1, 1, 4, 4\]",
        ),
        (lambda: BlockMask.from_dense(YES[:0]), ValueError, r"q_len must be between 1 and .* got 0"),
        (lambda: BlockMask.from_dense(YES[:, :0]), ValueError, r"k_len must be between 1 and .* got 0"),
        (
            lambda: BlockMask.from_dense(YES.expand(0, 4, 4)),
            ValueError,
            r"dense must have at least one batch element and head; got \[1, 0, 4, 4\]",
        ),
        (lambda: BlockMask.from_layout(torch.ones(4, 4)), TypeError, r"layout must be boolean .* got torch\.float32"),
        (lambda: BlockMask.from_layout(YES[0]), ValueError, r"layout must have shape \[Mq, Mk\], .* got \[4\]"),
        (
            lambda: BlockMask.from_layout(YES.expand(0, 1, 4, 4)),
            ValueError,
            r"layout must have at least one batch element and head; got \[0, 1, 4, 4\]",
        ),
        (lambda: BlockMask.from_layout(YES[:0]), ValueError, r"q_len must be between 1 and .* got 0"),
        (
            lambda: BlockMask.from_layout(YES, block=16, q_len=48),
            ValueError,
            r"layout must have 3 x 4 blocks of 16 x 16 for 48 queries and 64 keys; got 4 x 4",
        ),
        (
            lambda: BlockMask.from_layout(YES, block=(16, 32), k_len=129),
            ValueError,
            r"layout must have 4 x 5 blocks of 16 x 32 for 64 queries and 129 keys; got 4 x 4",
        ),
        (
            lambda: BlockMask.from_function(lambda q, k: q - k, 40),
            TypeError,
            r"what live returns must be boolean \(True: live\); got torch\.int64",
        ),
        (
            lambda: BlockMask.from_function(lambda q, k: k <= q, 40, block=16, candidates=YES),
            ValueError,
            r"candidates must have 3 x 3 blocks of 16 x 16 for 40 queries and 40 keys; got 4 x 4",
        ),
        (
            lambda: BlockMask.from_function(lambda q, k: k <= q, 64, block=16, candidates=YES[None]),
            ValueError,
            r"candidates must have shape \[Mq, Mk\]; got \[1, 4, 4\]",
        ),
        (
            lambda: BlockMask.from_function(lambda q, k: k <= q, 64, block=16, candidates=YES.int()),
            TypeError,
            r"candidates must be boolean \(True: live\); got torch\.int32",
        ),
        (
            lambda: BlockMask.from_function(lambda q, k: k <= q, 64, candidates=lambda i, j: i + j),
            TypeError,
            r"what candidates returns must be boolean \(True: live\); got torch\.int64",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, torch.tensor([0, 1]), 64, block=16),
            ValueError,
            r"rows and cols must have one shape \[E\]; got \[1\] and \[2\]",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, ZERO, 64, block=16, tile=torch.tensor([0, 0])),
            ValueError,
            r"rows and tile must have one shape \[E\]; got \[1\] and \[2\]",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO[0], ZERO[0], 64, block=16),
            ValueError,
            r"rows and cols must have one shape \[E\]; got \[\] and \[\]",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, ZERO, 64, block=16, live=YES[None]),
            ValueError,
            r"live must have shape \[T, 16, 16\]; got \[1, 4, 4\]",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, ZERO, 64, block=16, live=torch.ones(1, 16, 16)),
            TypeError,
            r"live must be boolean \(True: live\); got torch\.float32",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, ZERO, 64, block=16, live=torch.ones(2, 16, 16, dtype=torch.bool)),
            ValueError,
            r"live must have one entry per tile, 1, unless tile is given to assign them; got 2",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, ZERO, 64, block=16, tile=torch.tensor([0.5])),
            TypeError,
            r"tile must be an integer tensor; got torch\.float32",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, ZERO, 64, block=16, tile=[0.5]),
            TypeError,
            r"tile must be a list of integers; got torch\.float32",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, [0.5], 64, block=16),
            TypeError,
            r"cols must be a list of integers; got torch\.float32",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO + 4, ZERO, 64, block=16),
            ValueError,
            r"rows must lie in 0\.\.3; got 4\.\.4",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, ZERO - 1, 64, block=16),
            ValueError,
            r"cols must lie in 0\.\.3; got -1\.\.-1",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, ZERO, 64, block=16, tile=ZERO + 1),
            ValueError,
            r"tile must lie in 0\.\.0; got 1\.\.1",
        ),
        (
            lambda: BlockMask.from_tiles(torch.tensor([0, 1, 0]), torch.tensor([2, 0, 2]), 64, block=16),
            ValueError,
            r"a tile must not be listed twice",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO.float(), ZERO, 64, block=16),
            TypeError,
            r"rows must be an integer tensor; got torch\.float32",
        ),
        (
            lambda: BlockMask.from_function(lambda q, k: k <= q, 64, block=16, candidates=(ZERO, ZERO + 4)),
            ValueError,
            r"cols must lie in 0\.\.3; got 4\.\.4",
        ),
        (
            lambda: BlockMask.from_function(lambda q, k: k <= q, 64, block=16, candidates=(ZERO[[0, 0]], ZERO[[0, 0]])),
            ValueError,
            r"a tile must not be listed twice",
        ),
    ],
)
def test_constructors_say_what_they_refuse(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_one_tile_is_not_called_tiles():
    assert repr(BlockMask.dense(64, block=64)) == (
        "BlockMask(64 x 64, blocks of 64, 1 tile: 1 full + 0 partial, density 100 %)"
    )

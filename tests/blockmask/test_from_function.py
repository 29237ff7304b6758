import math

import numpy as np
import pytest
import torch
from hypothesis import given

from sparseflash import BlockMask, masks
from sparseflash.blockmask import rules
from tests.blockmask.mask_values import assert_same, sizes
from tests.drawn.masks import SEEDS, rule
from tests.watched.largest_tensor import LargestTensor


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
    def __init__(self, live, shape):
        self.live, self.asked, self.sizes = live, torch.zeros(shape, dtype=torch.bool), []

    def __call__(self, q, k):
        assert q.dtype == k.dtype == torch.int64
        answer = self.live(q, k)
        self.sizes.append(answer.numel())
        self.asked[q, k] = True
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
        lambda q, k: dict.fromkeys(range(256), 0)[q] == k,
        lambda q, k: np.arange(256)[int(k)] < q,
    ],
)
def test_a_rule_for_one_pair_at_a_time_is_refused_with_advice(live):
    message = r"^live must answer for many pairs at once\. Use &, \| and ~ instead of and"
    with pytest.raises(TypeError, match=message) as refused:
        BlockMask.from_function(live, 256)
    assert "\n" not in str(refused.value)  # the numbers of a tensor would fill the screen
    with pytest.raises(TypeError, match=r"^candidates must answer for many pairs at once"):
        BlockMask.from_function(lambda q, k: k <= q, 256, block=16, candidates=live)


def test_a_rule_that_returns_nothing_is_told_apart():
    with pytest.raises(TypeError, match=r"^live must return bools, .*; got None: is a `return` missing\?"):
        BlockMask.from_function(lambda q, k: None, 256)


def test_other_errors_of_a_rule_are_its_own():
    with pytest.raises(RuntimeError, match=r"^The size of tensor a"):
        BlockMask.from_function(lambda q, k: torch.zeros(3) < torch.zeros(5), 256)
    with pytest.raises(IndexError, match="index 300 is out of bounds"):
        BlockMask.from_function(lambda q, k: torch.zeros(256)[q + 300] < k, 256)


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
    monkeypatch.setattr(rules, "_PAIRS_AT_ONCE", 30)
    for candidates in (layout, lambda i, j: layout[i, j], layout.nonzero(as_tuple=True)):
        assert_same(BlockMask.from_function(rule("near", 90), 200, block=16, candidates=candidates), whole)


def test_a_predicate_over_many_tokens_takes_bounded_memory():
    asked = []

    def live(q, k):
        asked.append(len(asked))
        return k <= q

    with LargestTensor() as largest:
        mask = BlockMask.from_function(live, 8192)
    assert len(asked) == 8192**2 // rules.SCORES_AT_ONCE == 32
    assert largest.nbytes <= rules.SCORES_AT_ONCE  # the answer
    assert_same(mask, masks.causal(8192))

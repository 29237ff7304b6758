import copy
import pickle

import pytest
import torch

from sparseflash import BlockMask, attention, scores
from sparseflash.scores.change import Sizes
from sparseflash.scores.relative import Relative
from tests.backends.triton.plans import chunks_of, tilings_taken_by


@pytest.mark.parametrize(
    "change",
    [
        lambda: scores.relative(torch.randn(2, 9, requires_grad=True), scores.clipped(4)),
        lambda: scores.relative_2d(torch.randn(2, 7, 9, requires_grad=True), height=4, width=5),
    ],
    ids=["relative", "relative_2d"],
)
def test_a_change_that_was_first_used_in_inference_mode_can_be_trained(change):
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    table = change()
    with torch.inference_mode():
        want = attention(q, k, v, scores=table)
    out = attention(q, k, v, scores=table)
    assert torch.equal(out, want)
    (gradient,) = torch.autograd.grad(out.square().sum(), [table.table])
    assert gradient.shape == table.table.shape and gradient.abs().max() > 0


@pytest.mark.parametrize(
    "buckets", [scores.clipped(4), scores.t5_buckets(8, 20), scores.t5_buckets(2, 20, bidirectional=False)]
)
def test_a_table_is_pickled_and_copied_with_its_buckets(buckets):
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    table = scores.relative(torch.randn(2, 9), buckets)
    want = attention(q, k, v, scores=table)
    for other in (pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
        assert torch.equal(attention(q, k, v, scores=other), want)


def doubled(score, b, h, q, k):
    return 2 * score


def test_a_function_is_pickled_and_copied_after_a_call():
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    function = scores.function(doubled)
    want = attention(q, k, v, scores=function, backend="triton")
    for other in (pickle.loads(pickle.dumps(function)), copy.deepcopy(function)):
        assert torch.equal(attention(q, k, v, scores=other, backend="triton"), want)


class Replaced(dict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.clear()


def test_another_thread_may_replace_the_codes_at_any_time():
    table = Relative(torch.randn(2, 9), scores.clipped(4), Replaced())
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    want = attention(q, k, v, scores=scores.relative(table.table, table.bucket))
    assert torch.equal(attention(q, k, v, scores=table), want)


def test_one_table_serves_any_lengths():
    change, g = scores.relative(torch.randn(1, 41), scores.clipped(20)), torch.Generator().manual_seed(0)
    for q_len, k_len in ((20, 20), (20, 30), (10, 30), (10, 20), (30, 20)):
        q, k, v = (torch.randn(1, 1, n, 16, generator=g) for n in (q_len, k_len, k_len))
        offsets = torch.arange(k_len) - torch.arange(q_len)[:, None] - (k_len - q_len)
        bias = change.table[:, change.bucket(offsets)]
        wanted = attention(q, k, v, scores=scores.bias(bias[None]), backend="reference")
        torch.testing.assert_close(attention(q, k, v, scores=change), wanted, rtol=1e-5, atol=1e-5)


def test_buckets_may_begin_anywhere_in_a_tile():
    """A tile whose codes share one bucket takes a shorter way."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 48, 16, generator=g) for _ in range(3))
    table = 3 * torch.randn(1, 4, generator=g)
    mask = BlockMask.dense(48, block=16)
    for place in range(17):
        results = []
        for backend in ("triton", "reference"):
            learned = table.clone().requires_grad_()
            change = scores.relative(learned, lambda x, place=place: 2 * (x >= 34 - place) + (x >= place - 30).long())
            assert change.prepared(Sizes(1, 1, 48, 48, q.device, mask)).until.numel()
            with chunks_of(None), tilings_taken_by("own"):
                out, lse = attention(q, k, v, mask, scores=change, return_lse=True, backend=backend)
                results.append((out, lse, *torch.autograd.grad(out.square().sum(), [learned])))
        for found, wanted in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)

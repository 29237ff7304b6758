import functools
import re

import pytest
import torch

from sparseflash import attention, scores

ROWS = torch.ones(4)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: scores.alibi([1.0]), TypeError, "slopes must be a tensor of a floating dtype; got list"),
        (lambda: scores.alibi(torch.ones(2).to_sparse()), TypeError, "slopes must be a dense tensor; got one with the"),
        (lambda: scores.alibi(torch.ones(2, 2)), ValueError, "slopes must have shape [Hq]; got [2, 2]"),
        (lambda: scores.sink(torch.ones(2, 2)), ValueError, "logits must have shape [Hq]"),
        (lambda: scores.softcap(0.0), ValueError, "cap must be positive and finite in fp32; got 0.0"),
        (lambda: scores.softcap(1e39), ValueError, "cap must be positive and finite in fp32; got 1e+39"),
        (lambda: scores.softcap(1e-39), ValueError, "cap must be positive and finite in fp32; got 1e-39"),
        (lambda: scores.bias(ROWS), ValueError, "bias must have shape [B or 1, Hq or 1, Nq or 1, Nk or 1]; got [4]"),
        (lambda: scores.bias(torch.ones(1, 1, 4, 4, dtype=torch.bool)), TypeError, "got torch.bool"),
        (lambda: scores.key_bias(ROWS), ValueError, "Hq or 1, Nk]; got [4]. For x [B, Nk] pass x[:, None]."),
        (lambda: scores.temperature(torch.ones(4, 4)), ValueError, "temperature must have shape [Hq] or"),
        (lambda: scores.relative(ROWS, scores.clipped(1)), ValueError, "table must have shape [Hq, R]; got [4]"),
        (lambda: scores.relative(torch.ones(4, 3), 3), TypeError, "bucket must be a function of offsets"),
        (lambda: scores.clipped(1.5), TypeError, "most must be an integer number of tokens; got 1.5"),
        (lambda: scores.t5_buckets(3), ValueError, "count must be at least 4 buckets; got 3"),
        (lambda: scores.t5_buckets(1, bidirectional=False), ValueError, "count must be at least 2 buckets; got 1"),
        (
            lambda: scores.t5_buckets(32, 8),
            ValueError,
            "max_distance must be more than 8 tokens, which have buckets of their own with count=32; got 8",
        ),
        (
            lambda: scores.relative_2d(torch.ones(4, 3, 3), 2, 3),
            ValueError,
            "shape [Hq, 3, 5]; got [4, 3, 3]",
        ),
        (
            lambda: scores.relative_2d(torch.ones(4, 3, 3), 2, 2, cells=torch.tensor([4])),
            ValueError,
            "cells must lie in 0..3; got 4 to 4",
        ),
        (lambda: scores.relative_2d(torch.ones(4, 3, 3), 2, 2, cells=ROWS), ValueError, "cells must be int64 [N]"),
        (lambda: scores.function(3), TypeError, "a function of (score, b, h, q, k, *tensors) must be given; got int"),
        (lambda: scores.function(max, 3), TypeError, "what follows the function must be tensors; got int"),
        (
            lambda: scores.function(lambda s, h, q, k: s),
            TypeError,
            "the function must take 5 arguments: score, b, h, q, k, and then every tensor that follows the function",
        ),
        (
            lambda: scores.function(lambda s, b, h, q, k: s, ROWS),
            TypeError,
            "must take 6 arguments: score, b, h, q, k, and then every tensor that follows the function; got a",
        ),
        (
            lambda: scores.function(lambda s, *places: s, derivative=lambda s: s),
            TypeError,
            "the derivative must take 5 arguments: score, b, h, q, k, and then every tensor that follows the function",
        ),
        (
            lambda: scores.function(lambda s, *places: s, derivative=1.0),
            TypeError,
            "derivative must be a function; got float",
        ),
        (lambda: scores.softcap(1.0) + scores.softcap(2.0), ValueError, "at most one change of each kind; got two of"),
        (lambda: scores.softcap(ROWS[0]), TypeError, "For a learned one write scores.function(lambda score,"),
        (lambda: scores.softcap(1.0) + ROWS, TypeError, "scores must be made by sparseflash.scores"),
    ],
)
def test_what_cannot_be_made(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ([scores.softcap(1.0)], TypeError, "got list. scores.bias takes a tensor that is added to the scores, "),
        ([scores.softcap(1.0)], TypeError, "FlexAttention; + joins several changes."),
        (ROWS, TypeError, "scores must be made by sparseflash.scores, such as scores.alibi(slopes); got Tensor"),
        (
            lambda score, b, h, q, k: score,
            TypeError,
            "got function. scores.bias takes a tensor that is added to the "
            "scores, scores.function a function, and interop.from_score_mod a score_mod of FlexAttention",
        ),
        (scores.alibi(ROWS), ValueError, "slopes must have one entry for each of the 2 query heads; got 4"),
        (scores.alibi(torch.ones(2, device="meta")), ValueError, "slopes must be on q's device cpu; it is on meta"),
        (scores.bias(torch.ones(1, 2, 5, 9)), ValueError, "B, Hq, Nq, Nk], here [1, 2, 10, 10] or 1 instead; got"),
        (
            scores.key_bias(torch.ones(1, 1, 9)),
            ValueError,
            "shape [B, Hq, Nk], here [1, 2, 10] or 1",
        ),
        (scores.temperature(torch.ones(3, 1, 1)), ValueError, "temperature must have shape [B, Hq, Nq]"),
        (scores.relative(torch.ones(2, 3), scores.clipped(2)), ValueError, "bucket must return numbers from 0 to 2"),
        (
            scores.relative(torch.ones(2, 4), scores.clipped(2)),
            ValueError,
            "from 0 to 3, the table's columns; got 0 to 4",
        ),
        (
            scores.relative(torch.ones(2, 3), lambda x: x.clamp(-1, 2)),
            ValueError,
            "from 0 to 2, the table's columns; got -1 to 2",
        ),
        (scores.relative(torch.ones(2, 3), lambda x: x[:1]), ValueError, "one integer for each of the 19 offsets"),
        (
            scores.relative(torch.ones(2, 3), lambda x: x > 0),
            TypeError,
            "what bucket returns must be an integer tensor; got",
        ),
        (
            scores.relative(torch.ones(2, 3), lambda x: torch.zeros_like(x, device="meta")),
            ValueError,
            "what bucket returns must be on the device of the offsets, cpu; it is on meta",
        ),
        (scores.relative(torch.ones(2, 3), lambda x: x + 0j), TypeError, "an integer tensor; got torch.complex64"),
        (scores.relative(torch.ones(2, 3), lambda x: 1), TypeError, "an integer tensor; got int"),
        (scores.relative_2d(torch.ones(2, 3, 5), 2, 3), ValueError, "q must be one or several whole grids of 6 tokens"),
        (
            scores.relative_2d(torch.ones(2, 3, 5), 2, 3, cells=torch.arange(6)),
            ValueError,
            "cells must have one number for each of the 10 tokens; got 6",
        ),
        (
            scores.function(lambda s, b, h, q, k: s[0]),
            TypeError,
            "the function must be a function of single numbers that torch.vmap can call for many",
        ),
        (scores.function(lambda s, b, h, q, k: 1.0), ValueError, "must return a score, a tensor; got float"),
        (
            scores.function(lambda s, b, h, q, k: s + torch.zeros(2)),
            ValueError,
            "the function must return one answer for single numbers; got shape [2]",
        ),
        (
            scores.function(lambda s, b, h, q, k: s if h > 0 else -s),
            TypeError,
            "the function must answer for many scores at once",
        ),
    ],
)
def test_what_does_not_fit(change, error, text):
    q, k, v = (torch.randn(1, 2, 10, 8) for _ in range(3))
    with pytest.raises(error, match=re.escape(text)):
        attention(q, k, v, scores=change)


def test_a_function_must_not_capture_what_is_learned():
    gain = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="must not capture tensors that require gradients"):
        scores.function(lambda score, b, h, q, k: score * gain[h])


def test_a_function_is_judged_by_what_it_takes_not_by_what_it_wraps():
    def plain(score, q, k):
        return score - (q - k).abs()

    @functools.wraps(plain)
    def wrapping(score, b, h, q, k):
        return plain(score, q, k)

    x = torch.randn(1, 1, 5, 16)
    wrapped, direct = (scores.function(each) for each in (wrapping, lambda s, b, h, q, k: s - (q - k).abs()))
    assert torch.equal(attention(x, x, x, scores=wrapped), attention(x, x, x, scores=direct))

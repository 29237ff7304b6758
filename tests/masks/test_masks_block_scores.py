import functools
import itertools
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import masks
from tests.drawn.masks import SEEDS
from tests.masks.chosen_blocks import INTEGERS, MOST, antidiagonal, blocks_of, generator, sizes

# ---------------------------------------------------------------------- pooled scores


@given(sizes(), st.sampled_from([(4, 4), (4, 2), (3, 1)]), SEEDS)
def test_pooled_scores_are_the_mean_scores_of_the_tiles(drawn, heads, seed):
    q_len, k_len, block = drawn
    q = torch.randn(2, heads[0], q_len, 8, generator=generator(seed))
    k = torch.randn(2, heads[1], k_len, 8, generator=generator(seed + 1))
    raw = q.double() @ k.double().repeat_interleave(heads[0] // heads[1], 1).mT * 8**-0.5
    got = masks.pooled_scores(q, k, block=block)
    assert got.dtype == torch.float32 and got.shape == (2, heads[0], *blocks_of(q_len, k_len, block))
    for i in range(got.shape[2]):
        for j in range(got.shape[3]):
            tile = raw[..., i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            torch.testing.assert_close(got[..., i, j].double(), tile.mean((-2, -1)), rtol=1e-4, atol=1e-6)


@given(sizes(), st.integers(0, MOST), SEEDS)
def test_pooled_scores_with_lengths_are_those_of_the_shorter_sequence(drawn, length, seed):
    q_len, _, block = drawn
    q, k = torch.randn(2, 1, 2, q_len, 8, generator=generator(seed))
    got = masks.pooled_scores(q, k, block=block, lengths=torch.tensor([length]))
    length = min(length, q_len)
    rows, cols = blocks_of(length, length, block)
    assert (got[..., cols:] == -torch.inf).all() and got[..., :cols].isfinite().all()
    if length:
        short = masks.pooled_scores(q[:, :, :length], k[:, :, :length], block=block)
        torch.testing.assert_close(got[..., :rows, :cols], short, rtol=1e-4, atol=1e-6)


def test_what_lies_past_a_length_does_not_reach_pooled_scores():
    q, k = torch.randn(2, 1, 1, 64, 8, generator=generator(0))
    scores = masks.pooled_scores(q, k, block=16, lengths=torch.tensor([20]))
    q[:, :, 20:], k[:, :, 20:] = torch.nan, torch.inf
    assert torch.equal(masks.pooled_scores(q, k, block=16, lengths=torch.tensor([20])), scores)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_pooled_scores_are_summed_in_single_precision_under_autocast_too(dtype):
    q, k = torch.randn(2, 1, 2, 100, 16, generator=generator(0)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        got = masks.pooled_scores(q, k, block=32, scale=1.0)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(got, masks.pooled_scores(q.double(), k.double(), block=32, scale=1.0).to(got.dtype))


# ---------------------------------------------------------------------- antidiagonal scores


def antidiagonal_formula(q, k, block, stride, causal):
    (q_len, dim), k_len = q.shape, k.shape[0]
    groups_q, groups_k = -(-q_len // stride), -(-k_len // stride)
    s = torch.full((groups_q, groups_k), -torch.inf, dtype=torch.float64)
    for a, c in itertools.product(range(groups_q), range(groups_k)):
        last = min(a * stride + stride, q_len) - 1 + k_len - q_len
        if not causal or c * stride <= last:
            tokens = [(a * stride + stride - 1 - t, c * stride + t) for t in range(stride)]
            pairs = [(x, y) for x, y in tokens if x < q_len and y < k_len]
            s[a, c] = sum((q[x] @ k[y] for x, y in pairs), torch.tensor(0.0).double()) / (stride * dim**0.5)
    p = s.softmax(1).nan_to_num(0.0)
    found = torch.zeros(blocks_of(q_len, k_len, block), dtype=torch.float64)
    for i, j in itertools.product(*map(range, found.shape)):
        rows, cols = (slice(n * b // stride, (n + 1) * b // stride) for n, b in zip((i, j), block))
        found[i, j] = p[rows, cols].sum(1).mean()
    return found.log()


@given(sizes(), st.sampled_from([4, 8, 16]), st.booleans(), SEEDS, st.sampled_from([1, 1 << 24]))
def test_antidiagonal_scores_follow_their_formula(drawn, stride, causal, seed, at_once):
    q_len, k_len, block = drawn
    q = 3 * torch.randn(2, 2, q_len, 4, generator=generator(seed))
    k = torch.randn(2, 1, k_len, 4, generator=generator(seed + 1))
    with mock.patch.object(antidiagonal, "_AT_ONCE", at_once):
        got = masks.antidiagonal_scores(q, k, block=block, stride=stride, causal=causal)
    assert got.dtype == torch.float32 and got.shape == (2, 2, *blocks_of(q_len, k_len, block))
    for b, h in itertools.product(range(2), range(2)):
        want = antidiagonal_formula(q[b, h].double(), k[b, 0].double(), block, stride, causal)
        torch.testing.assert_close(got[b, h].double(), want, rtol=1e-4, atol=1e-4)


@given(sizes(), st.integers(0, MOST), st.booleans(), SEEDS)
def test_antidiagonal_scores_with_lengths_are_those_of_the_shorter_sequence(drawn, length, causal, seed):
    q_len, _, block = drawn
    q, k = torch.randn(2, 1, 2, q_len, 8, generator=generator(seed))
    length = min(length, q_len)
    q[:, :, length:], k[:, :, length:] = torch.nan, torch.inf
    given_arguments = {"block": block, "stride": 8, "causal": causal}
    got = masks.antidiagonal_scores(q, k, lengths=torch.tensor([length]), **given_arguments)
    rows, cols = blocks_of(length, length, block)
    assert (got[..., cols:] == -torch.inf).all() and (got[..., rows:, :] == -torch.inf).all()
    if length:
        short = masks.antidiagonal_scores(q[:, :, :length], k[:, :, :length], **given_arguments)
        torch.testing.assert_close(got[..., :rows, :cols], short, rtol=1e-4, atol=1e-5)


@given(INTEGERS, st.lists(st.integers(0, 127), min_size=2, max_size=2), st.booleans())
@example(torch.int8, [100, 127], True)
@example(torch.uint8, [100, 0], False)
def test_lengths_of_every_integer_type_serve_scores_of_more_tokens_than_it_counts(dtype, lengths, causal):
    q, k = torch.randn(2, 2, 1, 300, 8, generator=generator(0))
    lengths = torch.tensor(lengths)
    for scores in (masks.pooled_scores, functools.partial(masks.antidiagonal_scores, causal=causal)):
        got = scores(q, k, block=32, lengths=lengths.to(dtype))
        assert torch.equal(got, scores(q, k, block=32, lengths=lengths))
        assert torch.equal(got, scores(q, k, block=32, lengths=lengths.tolist()))
        with pytest.raises(TypeError, match=r"lengths must be an integer tensor; got torch\.float32"):
            scores(q, k, block=32, lengths=lengths.float())


def test_antidiagonals_cross_slashes_of_odd_distance_only():
    k = torch.eye(128)[None, None]
    odd, even = (
        masks.antidiagonal_scores(64 * k.roll(distance, 2), k, block=32, stride=8)[0, 0] for distance in (41, 40)
    )
    assert odd[3].argmax() == 2
    torch.testing.assert_close(even, torch.full((4, 4), 0.25).log())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_antidiagonal_scores_are_of_at_least_single_precision_and_carry_no_gradient(dtype):
    q, k = torch.randn(2, 1, 2, 100, 16, generator=generator(0)).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = masks.antidiagonal_scores(q, k, block=32, causal=True)
    assert got.dtype == torch.promote_types(dtype, torch.float32) and not got.requires_grad
    want = masks.antidiagonal_scores(q.double(), k.double(), block=32, causal=True)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=8 * torch.finfo(dtype).eps)

"""A `score_mod` of FlexAttention becomes changes of scores that do the same."""

import pytest
import torch

from sparseflash import attention, scores
from sparseflash.interop import from_score_mod

generator = torch.Generator().manual_seed(0)
SLOPES, PAIRS, KEYS, ROWS = (torch.randn(n, generator=generator) for n in ((2,), (2, 20, 20), (20, 2), (2, 20)))
TABLE = torch.randn(2, 39, generator=generator)
MODS = {
    "alibi": (lambda s, b, h, q, k: s + SLOPES[h] * (q - k).abs(), ("distance",)),
    "alibi of numbers": (lambda s, b, h, q, k: s - (k - q).float().abs() * SLOPES[h], ("distance",)),
    "softcap": (lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20), ("softcap",)),
    "capped and biased": (lambda s, b, h, q, k: torch.tanh(s / 20) * 20 + PAIRS[h, k, q], ("softcap", "bias")),
    "keys": (lambda s, b, h, q, k: KEYS[k, h] + s, ("key_bias",)),
    "heads": (lambda s, b, h, q, k: s - SLOPES[h], ("bias",)),
    "queries and keys": (lambda s, b, h, q, k: s - KEYS[k, h] + ROWS[h, q], ("key_bias", "bias")),
    "signed distance": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), ("function",)),
    "offsets": (lambda s, b, h, q, k: s + TABLE[h, k - q + 19], ("function",)),
    "capped last": (lambda s, b, h, q, k: 20 * torch.tanh((s + KEYS[k, h]) / 20), ("function",)),
    "other cap": (lambda s, b, h, q, k: 20 * torch.tanh(s / 10), ("function",)),
    "twice": (lambda s, b, h, q, k: s + PAIRS[h, q, k] + ROWS[h, q], ("function",)),
    "nothing": (lambda s, b, h, q, k: s, ("function",)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODS)
def test_it_is_recognised_and_does_the_same(name):
    score_mod, kinds = MODS[name]
    found = from_score_mod(score_mod, 20)
    assert found.kinds == kinds
    q, k, v = (torch.randn(1, 2, 20, 8, generator=generator) for _ in range(3))
    expected = attention(q, k, v, scores=scores.function(score_mod), return_lse=True)
    for one, other in zip(attention(q, k, v, scores=found, return_lse=True), expected):
        torch.testing.assert_close(one, other)


def test_alibi_of_other_lengths_is_no_alibi():
    assert from_score_mod(MODS["alibi"][0], 20, 30).kinds == ("function",)


def test_a_captured_tensor_may_be_learned_where_it_is_recognised():
    pairs = torch.zeros(2, 20, 20, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 20, 8, generator=generator) for _ in range(3))
    attention(q, k, v, scores=from_score_mod(lambda s, b, h, q, k: s + pairs[h, q, k], 20)).sum().backward()
    assert pairs.grad is not None and (pairs.grad != 0).any()
    with pytest.raises(ValueError, match="unless it is recognised as softcap, alibi or bias"):
        from_score_mod(lambda s, b, h, q, k: s * pairs[h, q, k], 20)

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, attention
from sparseflash.interop import from_sdpa, to_sdpa
from tests.drawn.masks import block_masks


@given(mask=block_masks(batch=2, heads=3), additive=st.booleans())
def test_a_mask_goes_out_and_comes_back(mask, additive):
    dense = to_sdpa(mask)
    assert dense.dtype == torch.bool and dense.shape == mask.shape
    block = (mask.block_q, mask.block_k)
    given_mask = torch.zeros(dense.shape).masked_fill(~dense, -torch.inf) if additive else dense
    assert from_sdpa(given_mask, block=block) == BlockMask.from_dense(dense, block=block)


@given(mask=block_masks(most_tokens=60, batch=2, heads=2), seed=st.integers(0, 99))
def test_pytorchs_attention_under_the_exported_mask_is_ours(mask, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, 2, n, 16, generator=generator, dtype=torch.float64) for n in (mask.q_len, mask.k_len, mask.k_len)
    )
    want = attention(q, k, v, mask, backend="reference")
    got = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=to_sdpa(mask))
    empty = ~mask.to_dense().any(-1, keepdim=True)
    torch.testing.assert_close(got.masked_fill(empty, 0), want, rtol=0, atol=1e-12)


def test_a_key_padding_mask_comes_in_for_all_queries():
    padding = torch.tensor([[False, False, True], [False, False, False]])
    mask = from_sdpa(~padding[:, None, None, :], q_len=5, block=16)
    assert mask.shape == (2, 1, 5, 3)
    assert torch.equal(mask.to_dense()[:, 0], ~padding[:, None, :].expand(2, 5, 3))
    many = from_sdpa(~padding[:1, None, None, :], q_len=1 << 20, k_len=None)
    assert many == BlockMask.from_function(lambda q, k: k < 2, 1 << 20, 3)
    assert from_sdpa(torch.ones(1, 7, 1, dtype=torch.bool), k_len=4, block=16) == BlockMask.dense(7, 4, block=16)


@given(
    keys=st.lists(st.booleans(), min_size=6, max_size=600).map(lambda live: torch.tensor(live[: len(live) // 6 * 6])),
    shape=st.sampled_from([(1,), (6, 1), (2, 3, 1), (3, 1, 1), (1, 2, 1)]),
    q_len=st.integers(1, 100),
    block=st.sampled_from([16, 32, (16, 64)]),
)
def test_keys_that_all_queries_see(keys, shape, q_len, block):
    live = keys.view(*shape, -1)
    want = live.expand(*shape[:-1], q_len, live.shape[-1])
    assert from_sdpa(live, q_len=q_len, block=block) == BlockMask.from_dense(want, block=block)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: from_sdpa(torch.ones(2, 2, dtype=torch.int64)), TypeError,
         "attn_mask must be a bool or floating point tensor; got torch.int64."),
        (lambda: from_sdpa(np.ones((2, 2))), TypeError, "got ndarray."),
        (lambda: from_sdpa(torch.ones(2, dtype=torch.bool)), ValueError,
         "attn_mask must have shape [Nq, Nk], [Hq, Nq, Nk] or [B, Hq, Nq, Nk]; got [2]."),
        (lambda: from_sdpa(torch.tensor([[0.0, -1e9]])), ValueError,
         "attn_mask must hold 0 and -inf only (a bias is not a mask); got -1000000000.0 at [0, 1]."),
        (lambda: from_sdpa(torch.tensor([[0.0, torch.nan]])), ValueError, "got nan at [0, 1]."),
        (lambda: from_sdpa(torch.tensor([[0.0, torch.inf]])), ValueError, "got inf at [0, 1]."),
        (lambda: from_sdpa(torch.ones(2, 2, dtype=torch.bool), q_len=3), ValueError,
         "q_len must be 2, as in attn_mask; got 3."),
    ],
)  # fmt: skip
def test_errors_say_what_must_hold(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()

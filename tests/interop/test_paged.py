"""The doors of vLLM and SGLang: sequences in pages against each sequence by itself, in fp64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash.interop import sglang, vllm
from tests.interop.flash_definitions import defined, live_scores


class Pool:
    """Sequences of drawn lengths in pages that are in any order, among pages of NaN."""

    def __init__(self, lengths, new, page, seed):
        generator = torch.Generator().manual_seed(seed)
        most = -(-max(lengths) // page)
        pages = torch.randperm(most * len(lengths) + 3, generator=generator)
        self.table = pages[: most * len(lengths)].view(len(lengths), most)
        self.lengths, self.page = torch.tensor(lengths), page
        self.k, self.v = torch.full((2, len(pages), page, 2, 16), torch.nan, dtype=torch.float64)
        self.q = [torch.randn(n, 4, 16, generator=generator, dtype=torch.float64) for n in new]
        self.keys, self.values = (
            [torch.randn(n, 2, 16, generator=generator, dtype=torch.float64) for n in lengths] for _ in "kv"
        )
        for pool, parts in ((self.k, self.keys), (self.v, self.values)):
            for row, x in zip(self.table, parts):
                at = torch.arange(len(x))
                pool[row[at // page], at % page] = x
        self.sums = torch.tensor([0, *new]).cumsum(0)
        self.sink = torch.randn(4, generator=generator, dtype=torch.float64)

    def wanted(self, left, softcap, sink, scale=0.25):
        parts = [
            defined(q, k, v, live_scores(len(q), len(k), True, (left, -1)), scale=scale, softcap=softcap, sink=sink)
            for q, k, v in zip(self.q, self.keys, self.values)
        ]
        outs, lses = zip(*parts)
        return torch.cat(outs), torch.cat(lses, 1)


@st.composite
def pools(draw):
    count = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    same = draw(st.integers(0, min(*lengths, 16)))
    new = [same or draw(st.integers(1, n)) for n in lengths]
    return Pool(lengths, new, draw(st.sampled_from((1, 5, 16))), draw(st.integers(0, 99)))


@given(pools(), st.sampled_from((-1, 7)), st.sampled_from((0.0, 2.0)), st.booleans())
def test_packed_queries_read_the_pages_of_their_sequences(pool, left, softcap, has_sink):
    sink = pool.sink if has_sink else None
    want = pool.wanted(left, softcap, sink)
    q, most = torch.cat(pool.q), int(pool.sums.diff().max())
    written = torch.full_like(q, torch.nan)
    got = vllm.flash_attn_varlen_func(
        q, pool.k, pool.v, most, pool.sums, 60, seqused_k=pool.lengths, block_table=pool.table, causal=True,
        window_size=[left, 0 if left >= 0 else -1], softcap=softcap, s_aux=sink, return_softmax_lse=True, out=written,
    )  # fmt: skip
    assert got[0] is written
    other = sglang.flash_attn_with_kvcache(
        q, pool.k, pool.v, cache_seqlens=pool.lengths, page_table=pool.table, cu_seqlens_q=pool.sums,
        max_seqlen_q=most, causal=True, window_size=(left, 0), softcap=softcap, sinks=sink, return_softmax_lse=True,
    )  # fmt: skip
    for found in (got, other):
        for one, value in zip(found, want, strict=True):
            torch.testing.assert_close(one.double(), value, atol=1e-6, rtol=1e-6)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=3), st.sampled_from((1, 4, 16)), st.sampled_from((None, 8)))
def test_a_step_over_pools_of_requests_and_tokens(lengths, page, window):
    pool = Pool(lengths, [1] * len(lengths), page, seed=len(lengths))
    # The slots of the tokens of each request; rows of other requests, and entries past the lengths, are of no use.
    slots = (pool.table[:, :, None] * page + torch.arange(page)).flatten(1)
    req_to_token = torch.full((5, slots.shape[1] + 3), 10**6)
    requests = torch.tensor([4, 1, 3][: len(lengths)])
    req_to_token[requests, : slots.shape[1]] = slots
    got = sglang.decode_attention(
        torch.cat(pool.q), pool.k.flatten(0, 1), pool.v.flatten(0, 1), req_to_token, requests, pool.lengths,
        page_size=page, logit_cap=2.0, window_size=window, sinks=pool.sink,
    )  # fmt: skip
    torch.testing.assert_close(got, pool.wanted(-1 if window is None else 7, 2.0, pool.sink)[0])


@pytest.mark.parametrize("page", [1, 16])
def test_kernels_read_the_same_pages(page):
    pool = Pool([33, 20], [1, 1], page, seed=3)
    k, v = (x.nan_to_num().to(torch.float16) for x in (pool.k, pool.v))
    q = torch.cat(pool.q).to(torch.float16)
    found = [
        vllm.flash_attn_varlen_func(
            q, k, v, 1, pool.sums, 33, seqused_k=pool.lengths, block_table=pool.table, causal=True, backend=backend
        )
        for backend in ("triton", "reference")
    ]
    torch.testing.assert_close(*found, atol=2e-3, rtol=2e-3)


def test_what_cannot_be_taken_is_refused_in_a_sentence():
    pool = Pool([8], [1], 4, seed=0)
    call = (torch.cat(pool.q), pool.k, pool.v, 1, pool.sums, 8)
    table = {"seqused_k": pool.lengths, "block_table": pool.table}
    for options, words in (
        ({}, "block_table and seqused_k must be given, without cu_seqlens_k; interop.flash_attn has the function for"),
        ({**table, "dropout_p": 0.5}, "dropout_p must be 0 with a cache; got 0.5"),
        ({**table, "q_v": pool.q[0]}, "q_v must be None; got 'a tensor'"),
        ({**table, "return_attn_probs": True}, "return_attn_probs must be False; return_softmax_lse returns lse"),
        ({**table, "seqused_k": torch.tensor([8, 8])}, "block_table must be of as many sequences as the lengths, 2"),
    ):
        with pytest.raises(ValueError, match=words):
            vllm.flash_attn_varlen_func(*call, **options)
    with pytest.raises(ValueError, match=r"k must have shape \[pages, page, heads, head dim\]; got"):
        vllm.flash_attn_varlen_func(call[0], call[1][0], *call[2:], **table)
    with pytest.raises(ValueError, match=r"k_buffer must be \[slots, heads, head dim\] with whole pages of 16 slots"):
        sglang.decode_attention(
            call[0], pool.k.flatten(0, 1)[:15], pool.v, pool.table, pool.table, pool.lengths, page_size=16
        )

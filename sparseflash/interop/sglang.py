"""SGLang's attention over its token pool, with its arguments and layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflash.decode import Backend
from sparseflash.interop.paged import packed_over_pages
from sparseflash.interop.tokens_first import refuse_unless


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, cu_seqlens_q: Any,
    max_seqlen_q: int, cu_seqlens_k_new: Any = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, return_softmax_lse: bool = False,
    sinks: Tensor | None = None, backend: Backend | None = None,
) -> Any:  # fmt: skip
    """`sgl_kernel.flash_attn.flash_attn_with_kvcache`, as SGLang's FlashAttention backend calls it.

    >>> k_cache, v_cache = torch.randn(2, 8, 16, 2, 64)  # [pages, page_size, Hkv, D]
    >>> q, page_table = torch.randn(2, 4, 64), torch.tensor([[7, 1], [2, 3]])
    >>> flash_attn_with_kvcache(
    ...     q, k_cache, v_cache, cache_seqlens=torch.tensor([20, 17]), page_table=page_table,
    ...     cu_seqlens_q=torch.tensor([0, 1, 2]), max_seqlen_q=1, causal=True,
    ... ).shape
    torch.Size([2, 4, 64])

    Args:
        q: the new tokens of all sequences, `[total_q, Hq, D]`, whose keys must have been written.
        k_cache, v_cache: `[pages, page_size, Hkv, D]`.
        cache_seqlens: keys of each sequence, the new ones included, integers `[B]`.
        page_table: the pages of each sequence, integers `[B, n]`.
        cu_seqlens_q, max_seqlen_q: running sums of the new tokens, integers `[B + 1]`, and the most of a sequence.
        cu_seqlens_k_new: not needed here.
        the others: as for `interop.flash_attn_cache`; lse is `[Hq, total_q]`.
    """
    out, lse = packed_over_pages(
        q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale=softmax_scale,
        causal=causal, window_size=window_size, softcap=softcap, learnable_sink=sinks, backend=backend,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def decode_attention(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, *,
    page_size: int = 1, sm_scale: float | None = None, logit_cap: float = 0.0, window_size: int | None = None,
    sinks: Tensor | None = None, backend: Backend | None = None,
) -> Tensor:  # fmt: skip
    """A decoding step over SGLang's pools of requests and tokens: `[B, Hq, D]` as `[B, Hq, Dv]`.

    >>> k_buffer, v_buffer = torch.randn(2, 100, 2, 64)  # one entry a token, in any order
    >>> req_to_token = torch.randperm(96).view(4, 24)  # where the tokens of each request are
    >>> q, requests = torch.randn(2, 4, 64), torch.tensor([3, 0])
    >>> decode_attention(q, k_buffer, v_buffer, req_to_token, requests, torch.tensor([20, 17])).shape
    torch.Size([2, 4, 64])

    Args:
        q: the newest token of each request; its key must have been written.
        k_buffer, v_buffer: `token_to_kv_pool.get_key_buffer(layer)` and the values', `[slots, Hkv, D]`.
        req_to_token: the slot of each token of each request, integers `[requests, tokens]`.
        req_pool_indices: the rows of `req_to_token` in this batch, integers `[B]`.
        seq_lens: tokens of each sequence, the newest included, integers `[B]`.
        page_size: SGLang's; slots of a page are neighbours. Larger pages are read faster.
        sm_scale: `1 / sqrt(D)` by default. logit_cap: 0 for none. window_size: keys that a query sees, itself included.
        sinks: logits `[Hq]`.

    The host does not wait. Entries of `req_to_token` past the length are not read.
    """
    refuse_unless(
        k_buffer.ndim == 3 and len(k_buffer) % page_size == 0, "k_buffer",
        f"[slots, heads, head dim] with whole pages of {page_size} slots", list(k_buffer.shape),
    )  # fmt: skip
    table = req_to_token[req_pool_indices][:, ::page_size]
    table = torch.div(table, page_size, rounding_mode="floor")
    shape = len(k_buffer) // page_size, page_size
    out, _ = packed_over_pages(
        q, k_buffer.unflatten(0, shape), v_buffer.unflatten(0, shape), seq_lens, table, None, 1,
        softmax_scale=sm_scale, causal=True, softcap=logit_cap, learnable_sink=sinks, backend=backend,
        window_size=(-1 if window_size is None else window_size - 1, 0),
    )  # fmt: skip
    return out

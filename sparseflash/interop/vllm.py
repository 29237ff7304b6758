"""vLLM's attention over its paged cache: block tables and `seq_lens`, with its arguments and layouts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparseflash.decode import Backend
from sparseflash.interop.paged import packed_over_pages
from sparseflash.interop.tokens_first import refuse_unless


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: int, cu_seqlens_q: Any, max_seqlen_k: int | None = None,
    cu_seqlens_k: Any = None, seqused_k: Tensor | None = None, q_v: Tensor | None = None, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Any = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Tensor | None = None, return_softmax_lse: bool = False, out: Tensor | None = None,
    scheduler_metadata: Any = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, num_splits: int = 0, fa_version: int | None = None, s_aux: Tensor | None = None,
    *, backend: Backend | None = None,
) -> Any:  # fmt: skip
    """`vllm.vllm_flash_attn.flash_attn_varlen_func` over vLLM's cache.

    >>> import torch
    >>> kv_cache = torch.randn(8, 2, 16, 2, 64)  # [blocks, keys and values, tokens of a block, Hkv, D]
    >>> key_cache, value_cache = kv_cache.unbind(1)
    >>> q, block_table = torch.randn(2, 4, 64), torch.tensor([[7, 1, 0], [2, 3, 0]])  # a new token of each sequence
    >>> seq_lens, query_start_loc = torch.tensor([20, 17]), torch.tensor([0, 1, 2])
    >>> out = flash_attn_varlen_func(
    ...     q, key_cache, value_cache, 1, query_start_loc, 20, seqused_k=seq_lens, block_table=block_table, causal=True
    ... )
    >>> out.shape
    torch.Size([2, 4, 64])

    Args:
        q: the new tokens of all sequences, `[total_q, Hq, D]`; their keys stand at the end of each sequence's
            `seqused_k` keys, so they must have been written.
        k, v: the whole cache, `[blocks, block_size, Hkv, D]`.
        max_seqlen_q, cu_seqlens_q: the longest number of new tokens, and `query_start_loc`, integers `[B + 1]`.
        seqused_k, block_table: `seq_lens`, integers `[B]`, and the blocks of each sequence, integers `[B, n]`.
        softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux (sinks): as for `interop.flash_attn`.
        out: written in place, if given. return_softmax_lse: returns `(out, lse)`, lse being `[Hq, total_q]`.
        max_seqlen_k, scheduler_metadata, fa_version, deterministic: not needed here. q_descale and the like concern fp8
            caches, which are refused.
        backend: as for `attention_with_cache`.

    Steps in which every sequence has the same number of new tokens, 16 at most, run in the decoding kernel, as CUDA
    graphs need it; in others the keys are copied out of their blocks.
    """
    refuse_unless(
        block_table is not None and seqused_k is not None and cu_seqlens_k is None, "block_table and seqused_k",
        "given, without cu_seqlens_k; interop.flash_attn has the function for keys without a cache", "others",
    )  # fmt: skip
    refuse_unless(q_v is None, "q_v", "None", "a tensor")
    refuse_unless(not dropout_p, "dropout_p", "0 with a cache", dropout_p)
    refuse_unless(not return_attn_probs, "return_attn_probs", "False; return_softmax_lse returns lse", True)
    assert block_table is not None and seqused_k is not None
    options = {"num_splits": num_splits} if num_splits else {}
    made, lse = packed_over_pages(
        q, k, v, seqused_k, block_table, cu_seqlens_q, max_seqlen_q, softmax_scale=softmax_scale, causal=causal,
        window_size=(-1, -1) if window_size is None else tuple(window_size), softcap=softcap,
        alibi_slopes=alibi_slopes, learnable_sink=s_aux, backend=backend, **options,
    )  # fmt: skip
    made = made if out is None else out.copy_(made)
    return (made, lse) if return_softmax_lse else made

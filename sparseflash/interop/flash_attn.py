"""FlashAttention's functions, with its arguments and layouts: change the import, and keep the calls.

| their line | our line |
|---|---|
| `from flash_attn import flash_attn_func` | `from sparseflash.interop.flash_attn import flash_attn_func` |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflash.attention import Backend, attention
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, integer_tensor
from sparseflash.blockmask.cache import bounded_tensors
from sparseflash.interop.alibi import alibi_of_batch, score_changes
from sparseflash.interop.flash_attn_varlen import Window, packed_attention, sides, window
from sparseflash.interop.paged import packed_over_pages
from sparseflash.interop.tokens_first import heads_first, refuse_unless

_NO_LIMIT = (-1, -1)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = _NO_LIMIT, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, learnable_sink: Tensor | None = None,
    return_lse: bool = False, block: Block = 128, backend: Backend | None = None,
) -> Any:  # fmt: skip
    """`flash_attn.flash_attn_func`, computed by `attention`.

    >>> q, k, v = torch.randn(3, 2, 100, 4, 16)  # [B, N, H, D]
    >>> flash_attn_func(q, k, v, causal=True, window_size=(32, 0)).shape
    torch.Size([2, 100, 4, 16])

    Args:
        q, k, v: `[B, Nq, Hq, D]`, `[B, Nk, Hkv, D]` and `[B, Nk, Hkv, Dv]`.
        causal: aligned at the bottom right: the last query sees the last key.
        window_size: `(left, right)`: query i sees keys from `i + Nk - Nq - left` to `i + Nk - Nq + right`, -1 or None
            for no limit. With `causal`, right is 0.
        softcap: 0 for none. alibi_slopes: `[Hq]` or `[B, Hq]`. learnable_sink: logits `[Hq]`, as in FlashAttention-4.
        deterministic: True and False give the same bits at every call here.
        return_attn_probs: returns `(out, lse, None)`. return_lse: returns `(out, lse)`, with lse `[B, Hq, Nq]`.
        dropout_p, softmax_scale, block, backend: as `dropout_p`, `scale`, `block` and `backend` of `sdpa`.

    The mask of each window and pair of lengths is made once and kept.
    """
    qh, kh, vh = heads_first(q, "q"), heads_first(k, "k"), heads_first(v, "v")
    del deterministic
    left, right = sides(window_size, causal)
    mask = None
    if not (left is right is None) and qh.shape[2] and kh.shape[2]:
        make = _made if torch.compiler.is_compiling() else _kept
        mask = make(qh.shape[2], kh.shape[2], left, right, block, q.device)
    changes = score_changes(softcap, learnable_sink)
    if alibi_slopes is not None:
        shift = kh.shape[2] - qh.shape[2]
        changes = changes + alibi_of_batch(alibi_slopes, q, qh.shape[0], shift)
    out, lse = attention(
        qh, kh, vh, mask, scale=softmax_scale, return_lse=True, dropout_p=dropout_p,
        scores=changes if changes.changes else None, backend=backend,
    )  # fmt: skip
    return _returned(out.transpose(1, 2), lse, return_lse, return_attn_probs, dropout_p)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = _NO_LIMIT, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None, *,
    learnable_sink: Tensor | None = None, return_lse: bool = False, block: Block = 128, backend: Backend | None = None,
) -> Any:  # fmt: skip
    """`flash_attn.flash_attn_varlen_func`, computed by `attention` under the mask of `varlen_mask`.

    >>> q, k, v = torch.randn(3, 300, 4, 16)  # 300 tokens of three sequences
    >>> cu_seqlens = torch.tensor([0, 100, 250, 300], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 150, 150, causal=True).shape
    torch.Size([300, 4, 16])

    Args:
        q, k, v: packed tokens, `[total_q, Hq, D]`, `[total_k, Hkv, D]` and `[total_k, Hkv, Dv]`. Tokens past all
            sequences are padding: their out is 0, their lse -inf, their gradients 0.
        cu_seqlens_q, cu_seqlens_k: the running sums of the lengths. On a GPU the first call with a tensor waits for it.
        max_seqlen_q: needed with a `block_table` only. max_seqlen_k: not needed here.
        block_table: the pages of each sequence, integers `[B, n]`; k and v are then all pages, `[P, page, Hkv, D]`, and
            have no gradients.
        the others: as for `flash_attn_func`; `alibi_slopes [B, Hq]` has one row for each sequence; lse is
            `[Hq, total_q]`.
    """
    if block_table is not None:
        return _of_pages(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, block_table, (return_lse, return_attn_probs), dropout_p,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
            alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, backend=backend,
        )  # fmt: skip
    del max_seqlen_q, max_seqlen_k, deterministic
    out, lse = packed_attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, block=block,
        backend=backend,
    )  # fmt: skip
    return _returned(out, lse, return_lse, return_attn_probs, dropout_p)


def _of_pages(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int | None,
    block_table: Tensor, returns: tuple[bool, bool], dropout_p: float, **options: Any,
) -> Any:  # fmt: skip
    refuse_unless(not dropout_p, "dropout_p", "0 with a block_table", dropout_p)
    refuse_unless(max_seqlen_q is not None, "max_seqlen_q", "given with a block_table", None)
    assert max_seqlen_q is not None
    lengths = integer_tensor(cu_seqlens_k, "cu_seqlens_k", q.device).diff()
    out, lse = packed_over_pages(q, k, v, lengths, block_table, cu_seqlens_q, max_seqlen_q, **options)
    return _returned(out, lse, *returns, dropout_p)


def _made(q_len: int, k_len: int, left: int | None, right: int | None, block: Block, device: Any) -> BlockMask:
    return window(q_len, k_len, left, right, block).to(device)


_kept = bounded_tensors(maxsize=32)(_made)


def _returned(out: Tensor, lse: Tensor, return_lse: bool, return_attn_probs: bool, dropout_p: float) -> Any:
    if not return_attn_probs:
        return (out, lse) if return_lse else out
    refuse_unless(
        not dropout_p, "dropout_p", "0 with return_attn_probs=True, because the weights are never all in memory",
        dropout_p,
    )  # fmt: skip
    return out, lse, None

"""FlashAttention's functions for queries, keys and values in one tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparseflash.blockmask.arguments import dense_tensor
from sparseflash.interop.flash_attn import flash_attn_func, flash_attn_varlen_func


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn.flash_attn_qkvpacked_func`, of `qkv [B, N, 3, H, D]`; other arguments as of `flash_attn_func`.

    >>> import torch
    >>> flash_attn_qkvpacked_func(torch.randn(2, 100, 3, 4, 16), causal=True).shape
    torch.Size([2, 100, 4, 16])
    """
    return flash_attn_func(*_parts(qkv, "qkv", 3, 5), *args, **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn.flash_attn_kvpacked_func`, of `q [B, Nq, Hq, D]` and `kv [B, Nk, 2, Hkv, D]`."""
    return flash_attn_func(q, *_parts(kv, "kv", 2, 5), *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Any, max_seqlen: int | None = None, *args: Any, **options: Any
) -> Any:
    """`flash_attn.flash_attn_varlen_qkvpacked_func`, of `qkv [total, 3, H, D]`."""
    q, k, v = _parts(qkv, "qkv", 3, 4)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **options)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn.flash_attn_varlen_kvpacked_func`, of `q [total_q, Hq, D]` and `kv [total_k, 2, Hkv, D]`."""
    return flash_attn_varlen_func(q, *_parts(kv, "kv", 2, 4), *args, **options)


def _parts(x: Tensor, name: str, count: int, ndim: int) -> Any:
    if dense_tensor(x, name).ndim != ndim or x.shape[-3] != count:
        tokens = "batch, tokens" if ndim == 5 else "tokens"
        raise ValueError(f"{name} must have shape [{tokens}, {count}, heads, head dim]; got {list(x.shape)}.")
    return x.unbind(-3)

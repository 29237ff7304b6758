"""Packed queries over keys and values in pages: what the doors of vLLM and SGLang share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflash.blockmask.arguments import dense_tensor
from sparseflash.decode import FEW
from sparseflash.interop.flash_attn_cache import flash_attn_with_kvcache
from sparseflash.interop.flash_attn_varlen import packed_attention
from sparseflash.interop.tokens_first import refuse_unless


def packed_over_pages(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, seq_lens: Tensor, block_table: Tensor, cu_seqlens_q: Any,
    max_seqlen_q: int, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out [total_q, Hq, Dv], lse [Hq, total_q])` of packed queries, the last tokens of their sequences.

    >>> q, pages = torch.randn(5, 4, 16), torch.randn(6, 8, 2, 16)
    >>> table, sums = torch.tensor([[0, 1, 2], [5, 4, 3]]), torch.tensor([0, 1, 5])
    >>> packed_over_pages(q, pages, pages, torch.tensor([20, 9]), table, sums, 4, causal=True)[0].shape
    torch.Size([5, 4, 16])

    Args:
        k_pages, v_pages: `[P, page, Hkv, D]`.
        seq_lens: keys of each sequence, the new ones included, integers `[B]`.
        block_table: the pages of each sequence, integers `[B, n]`.
        max_seqlen_q: the longest sequence of queries.

    If all sequences have equally many queries, 16 at most, the decoding kernel reads the pages, and the host does not
    wait. Otherwise the keys are copied out of the pages, and the host waits for the lengths.
    """
    for name, x, ndim, shape in (
        ("q", q, 3, "[tokens, heads, head dim]"),
        ("k", k_pages, 4, "[pages, page, heads, head dim]"),
        ("v", v_pages, 4, "[pages, page, heads, head dim]"),
    ):
        if dense_tensor(x, name).ndim != ndim:
            raise ValueError(f"{name} must have shape {shape}; got {list(x.shape)}.")
    batch = len(seq_lens)
    refuse_unless(
        len(block_table) == batch, "block_table", f"of as many sequences as the lengths, {batch}", len(block_table)
    )
    if batch * max_seqlen_q == len(q) and 0 < max_seqlen_q <= FEW:
        out, lse = flash_attn_with_kvcache(
            q.unflatten(0, (batch, max_seqlen_q)), k_pages, v_pages, cache_seqlens=seq_lens, block_table=block_table,
            return_softmax_lse=True, **options,
        )  # fmt: skip
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    page, device = k_pages.shape[1], q.device
    sums = torch.nn.functional.pad(seq_lens.long().cumsum(0), (1, 0))
    row = torch.repeat_interleave(torch.arange(batch, device=device), seq_lens.long())
    at = torch.arange(len(row), device=device) - sums[row]
    pages, at = block_table[row, at // page].long(), at % page
    return packed_attention(q, k_pages[pages, at], v_pages[pages, at], cu_seqlens_q, sums, **options)

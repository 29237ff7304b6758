"""Attention by three implementations with equal results.

q, k and v are [B, H, N, D]. `sparseflash` takes a mask of the library or a plan, the others an `ElementMask`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import sparseflash
from sparseflash import BlockMask, distributed
from sparseflash.distributed import ShardPlan

IMPLEMENTATIONS = ("sparseflash", "sdpa", "standard")
SMALLEST_HEAD = 16


@dataclass(frozen=True)
class ElementMask:
    scores: Tensor | None  # bool, broadcasts to [B, H, N, N], at least one live score in each row; None: all live
    empty: Tensor | None = None  # bool [B, H or 1, N, 1]: queries with output 0

    @classmethod
    def within(cls, pattern: Tensor | None, lengths: Tensor | None, length: int) -> ElementMask:
        keys = None
        if lengths is not None:
            keys = (torch.arange(length, device=lengths.device) < lengths[:, None])[:, None, None]  # [B, 1, 1, N]
        if pattern is None:
            return cls(keys)
        scores = pattern if keys is None else pattern & keys
        empty = ~scores.any(-1, keepdim=True)
        return cls(scores | empty, empty)  # the softmax of a dead row would be NaN


def row_multiple(implementation: str, block: int) -> int:
    """Rows of a multiple of this number are fastest: whole mask blocks, or rows of scores at multiples of 16 bytes."""
    return {"sparseflash": block, "sdpa": 1, "standard": math.gcd(8, block)}[implementation]


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | ShardPlan, dropout_p: float = 0.0
) -> Tensor:
    """Heads of fewer than 16 features are padded with zeros. mask: a plan if several processes share the tokens."""
    head_dim = q.shape[-1]
    missing = max(0, SMALLEST_HEAD - head_dim)
    if missing:
        q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
    scale = head_dim**-0.5
    if isinstance(mask, ShardPlan):
        out = distributed.attention(q, k, v, mask, scale=scale, dropout_p=dropout_p)
    else:
        out = sparseflash.attention(q, k, v, mask, scale=scale, dropout_p=dropout_p)
    return out[..., :head_dim]


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: ElementMask, dropout_p: float = 0.0) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.scores, dropout_p=dropout_p)
    return out if mask.empty is None else out.masked_fill(mask.empty, 0.0)


def standard_attention(q: Tensor, k: Tensor, v: Tensor, mask: ElementMask, dropout_p: float = 0.0) -> Tensor:
    """All N x N scores, their softmax, and its product with v, each a matrix in memory.

    In place, and without autocast's fp32 copy of the softmax.
    """
    with torch.autocast(q.device.type, enabled=False):
        scores = (q * q.shape[-1] ** -0.5) @ k.mT
        if mask.scores is not None:
            scores = scores.masked_fill_(~mask.scores, -math.inf)
        weights = F.dropout(scores.softmax(-1), dropout_p)
        out = weights @ v
    return out if mask.empty is None else out.masked_fill(mask.empty, 0.0)


def attention(
    implementation: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask | ShardPlan | ElementMask,
    dropout_p: float = 0.0,
) -> Tensor:
    if isinstance(mask, BlockMask | ShardPlan):
        if implementation != "sparseflash":
            raise TypeError(f"{implementation} must be given an ElementMask; got a {type(mask).__name__}")
        return block_sparse_attention(q, k, v, mask, dropout_p)
    return {"sdpa": sdpa_attention, "standard": standard_attention}[implementation](q, k, v, mask, dropout_p)

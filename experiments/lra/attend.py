"""The attention of a model by each of three implementations, which compute the same.

q, k and v are [B, H, N, D]. `sparseflash` reads a mask of the library; the other two a `Live`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseflash import BlockMask, attention

IMPLEMENTATIONS = ("sparseflash", "sdpa", "standard")
SMALLEST_HEAD = 16


@dataclass(frozen=True)
class Live:
    """Which scores are live, for implementations without block masks."""

    scores: Tensor | None  # bool, broadcasts to [B, H, N, N], at least one in a row; None: all are live
    empty: Tensor | None = None  # bool [B, H or 1, N, 1], the queries whose output is 0; None: there are none

    @classmethod
    def within(cls, pattern: Tensor | None, lengths: Tensor | None, length: int) -> Live:
        """A pattern bool [1 or B, 1 or H, N, N], None for all scores, without the keys past lengths [B], None for N."""
        keys = None
        if lengths is not None:
            keys = (torch.arange(length, device=lengths.device) < lengths[:, None])[:, None, None]  # [B, 1, 1, N]
        if pattern is None:
            return cls(keys)  # no sequence is empty, so no row is
        scores = pattern if keys is None else pattern & keys
        empty = ~scores.any(-1, keepdim=True)
        return cls(scores | empty, empty)  # the softmax of a row without a live score would be NaN


def rows_of(implementation: str, block: int) -> int:
    """The number of tokens that rows of a batch are a multiple of, which suits the implementation best.

    Ours takes whole blocks of the mask. Matrix products are slow on rows that do not begin at a multiple of 16 bytes,
    so `standard`, which stores rows of scores, takes eights; `sdpa` does not store them.
    """
    return {"sparseflash": block, "sdpa": 1, "standard": math.gcd(8, block)}[implementation]


def sparseflash(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, dropout_p: float = 0.0) -> Tensor:
    """The library's. The kernel takes heads of 16 and more: zeros beside fewer change nothing."""
    head_dim = q.shape[-1]
    missing = max(0, SMALLEST_HEAD - head_dim)
    if missing:
        q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
    return attention(q, k, v, mask, scale=head_dim**-0.5, dropout_p=dropout_p)[..., :head_dim]


def sdpa(q: Tensor, k: Tensor, v: Tensor, live: Live, dropout_p: float = 0.0) -> Tensor:
    """PyTorch's own. Without padding it may take a FlashAttention kernel, with padding one that takes masks."""
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=live.scores, dropout_p=dropout_p)
    return out if live.empty is None else out.masked_fill(live.empty, 0.0)


def standard(q: Tensor, k: Tensor, v: Tensor, live: Live, dropout_p: float = 0.0) -> Tensor:
    """The textbook's: all N x N scores, their softmax, its product with v, each a matrix in memory.

    The leanest plain form: the scale is applied to q and the mask in place, which saves two matrices; and the softmax
    stays in the inputs' dtype, where autocast would write it in fp32 and copy it back.
    """
    with torch.autocast(q.device.type, enabled=False):
        scores = (q * q.shape[-1] ** -0.5) @ k.mT
        if live.scores is not None:
            scores = scores.masked_fill_(~live.scores, -math.inf)
        weights = F.dropout(scores.softmax(-1), dropout_p)
        out = weights @ v
    return out if live.empty is None else out.masked_fill(live.empty, 0.0)


def attend(
    implementation: str, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Live, dropout_p: float = 0.0
) -> Tensor:
    """Attention [B, H, N, D] by the named implementation, with the kind of mask that it reads."""
    if isinstance(mask, BlockMask):
        if implementation != "sparseflash":
            raise TypeError(f"{implementation} must be given a Live, not a BlockMask")
        return sparseflash(q, k, v, mask, dropout_p)
    return {"sdpa": sdpa, "standard": standard}[implementation](q, k, v, mask, dropout_p)

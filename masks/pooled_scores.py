"""Pooled scores: estimates of the attention of a block of queries to a block of keys, from the means of both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparseflash.autocast import without_autocast
from sparseflash.blockmask.arguments import Block, block_pair
from sparseflash.blockmask.by_name import by_name
from sparseflash.masks.tiling.chosen import check_queries_and_keys, checked_factor


@by_name
@torch.no_grad()
def pooled_scores(
    q: Tensor,
    k: Tensor,
    *,
    block: Block = 128,
    scale: float | None = None,
    lengths: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Block scores `[B, Hq, Mq, Mk]` from mean-pooled queries and keys, a basis for choosing blocks.

    >>> q, k = torch.randn(1, 4, 1000, 32), torch.randn(1, 2, 1000, 32)
    >>> pooled_scores(q, k, block=64).shape
    torch.Size([1, 4, 16, 16])

        score(i, j) = scale * mean(q[t] for t in block i) . mean(k[t] for t in block j)

    which is the mean of the scores of the tile. A softmax over j is the usual estimate of the attention to each block;
    it is good only if the tokens of a block resemble one another. The mean of a ragged last block is over its existing
    tokens.

    Args:
        q, k: `[B, Hq, Nq, D]` and `[B, Hkv, Nk, D]`, with Hq a multiple of Hkv; query head h reads key head `h // (Hq
            // Hkv)`.
        block: tokens per side of a tile.
        scale: `1 / sqrt(D)` by default.
        lengths: int `[B]`, tokens of each sequence: only those are averaged, and blocks of keys without any score -inf,
            so they are never chosen. Pass the lengths to the mask as well: `mask.with_lengths`.

    The scores are fp32 (fp64 for fp64), under autocast as well, and carry no gradient. The host does not wait for the
    device.

    Source: MInference's block-sparse heads (Jiang et al., 2024), VSA (Zhang et al., 2025), SpargeAttn (Zhang et al.,
    2025; it keeps blocks whose tokens do not resemble one another dense). SeerAttention (Gao et al., 2024) learns the
    pooling; Quest (Tang et al., 2024) bounds the scores by minima and maxima instead. XAttention uses
    `antidiagonal_scores`.

    Raises ValueError for tensors or lengths of other shapes, TypeError for lengths that are not integers.
    """
    block_q, block_k = block_pair(block)
    lengths = check_queries_and_keys(q, k, lengths)
    (batch, heads, _, dim), kv_heads = q.shape, k.shape[1]
    with without_autocast(q.device):
        q_mean, k_mean = means_of_blocks(q, block_q, lengths), means_of_blocks(k, block_k, lengths)
        q_mean = q_mean.reshape(batch, kv_heads, -1, dim)  # the query heads of a group, one after another
        scores = (q_mean * checked_factor(scale, dim)) @ k_mean.transpose(-1, -2)
    scores = scores.view(batch, heads, -1, k_mean.shape[2])
    if lengths is not None:
        starts = torch.arange(k_mean.shape[2], device=k.device) * block_k
        scores = scores.masked_fill(starts >= lengths.view(-1, 1, 1, 1), -torch.inf)
    return scores


def means_of_blocks(x: Tensor, block: int, lengths: Tensor | None) -> Tensor:
    """The mean of each block of tokens: `[B, H, N, D]` to `[B, H, ceil(N / block), D]`; 0 for a block
    without tokens.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    length = x.shape[2]
    whole = length // block * block
    if lengths is None:
        parts = [x[:, :, :whole].unflatten(2, (-1, block)).mean(3, dtype=dtype)] if whole else []
        if whole < length:
            parts.append(x[:, :, whole:].mean(2, keepdim=True, dtype=dtype))
        return torch.cat(parts, 2) if len(parts) > 1 else parts[0]
    tokens = torch.arange(length, device=x.device)
    x = x.masked_fill((tokens >= lengths.view(-1, 1))[:, None, :, None], 0.0)
    x = torch.nn.functional.pad(x, (0, 0, 0, -length % block)).unflatten(2, (-1, block)).sum(3, dtype=dtype)
    starts = torch.arange(x.shape[2], device=x.device) * block
    count = (lengths.clamp(max=length).view(-1, 1) - starts).clamp(1, block)
    return x / count[:, None, :, None]

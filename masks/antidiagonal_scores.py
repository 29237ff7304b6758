"""Antidiagonal scores: estimates of the attention of a block of queries to a block of keys, from every token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparseflash.autocast import without_autocast
from sparseflash.blockmask.arguments import Block, block_pair, flag
from sparseflash.blockmask.by_name import by_name
from sparseflash.masks.tiling.arguments import at_least
from sparseflash.masks.tiling.chosen import check_queries_and_keys, checked_factor

_AT_ONCE = 1 << 24  # scores of groups at a time: 64 MB, and a few times as much in temporaries


@by_name
@torch.no_grad()
def antidiagonal_scores(
    q: Tensor, k: Tensor, *, block: Block = 128, stride: int = 16, causal: bool = False, scale: float | None = None,
    lengths: Tensor | Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Block scores `[B, Hq, Mq, Mk]` from sums along antidiagonals (XAttention), a basis for choosing blocks.

    >>> q, k = torch.randn(1, 4, 1000, 32), torch.randn(1, 2, 1000, 32)
    >>> scores = antidiagonal_scores(q, k, block=64, stride=8, causal=True)
    >>> scores.shape, torch.allclose(scores.exp().sum(-1), torch.tensor(1.0))
    (torch.Size([1, 4, 16, 16]), True)

    Tokens are taken in groups of `stride` (S). The score of two groups is the mean over the antidiagonal of their S x S
    tile, so that every query and every key counts:

        s(a, c) = scale / S * sum of q[a S + S - 1 - t] . k[c S + t] over t = 0 .. S - 1
        p(a, c) = softmax over c of s(a, c)
        score(i, j) = log( mean over the groups a of block i of the sum of p(a, c) over the groups c of block j )

    So `score.exp()` sums to 1 over j: it estimates the share of attention of each block, and `mass_blocks` keeps the
    fewest blocks that hold enough of it. With `causal`, group a sees the groups that start at or before its last query
    (aligned at the bottom right, as in `masks.causal`); the softmax runs over those only. On the antidiagonals of an
    even S, `q + k` is odd, so a diagonal at an even distance `q - k` shows only in its neighbours.

    Args:
        q, k: `[B, Hq, Nq, D]` and `[B, Hkv, Nk, D]`, with Hq a multiple of Hkv; query head h reads key head `h // (Hq
            // Hkv)`.
        block, stride: tokens; `stride` must divide `block`.
        causal: no query sees a key after it.
        scale: `1 / sqrt(D)` by default.
        lengths: int `[B]`, tokens of each sequence. Tokens past a ragged end or a length add 0 to the sum of their
            group; groups without tokens take no part in the softmax or the mean, and blocks without tokens score -inf.

    Products are computed in the dtype of q and k, everything else in fp32 (fp64 for fp64), under autocast as well; the
    scores carry no gradient. Time is proportional to `Nq Nk D / S`; memory is bounded. The host does not wait for the
    device.

    Source: XAttention (Xu et al., 2025, section 2.1 and algorithm 1) with strides of 8 and 16, `select_mode="inverse"`
    of its code. That code pads the ends with zeros, which take part if the mask is not causal.

    Raises TypeError or ValueError for tensors or lengths of other shapes, or a stride that does not divide the block.

    >>> from sparseflash.masks import mass_blocks
    >>> mass_blocks(scores, mass=0.9, q_len=1000, block=64, causal=True, sink_blocks=1, local_blocks=1).shape
    (1, 4, 1000, 1000)
    """
    block_q, block_k = block_pair(block)
    stride, causal = at_least(1, stride, "stride", "tokens"), flag(causal, "causal")
    if block_q % stride or block_k % stride:
        raise ValueError(f"stride must divide the block; got {stride} and {block!r}.")
    lengths = check_queries_and_keys(q, k, lengths)
    (batch, heads, q_len, dim), (kv_heads, k_len) = q.shape, k.shape[1:3]
    factor = checked_factor(scale, dim) / stride
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries = _groups(q, block_q, stride, lengths).flip(3).flatten(3)  # [B, Hq, Gq, S D]
    keys = _groups(k, block_k, stride, lengths).flatten(3)  # [B, Hkv, Gk, S D]
    first_q, first_k = (torch.arange(x.shape[2], device=q.device) * stride for x in (queries, keys))
    last_q = (first_q + stride - 1).clamp(max=q_len - 1) + (k_len - q_len)
    stop = None if lengths is None else lengths.view(-1, 1, 1, 1)
    no_key = first_k >= (k_len if stop is None else stop.clamp(max=k_len))  # [Gk] or [B, 1, 1, Gk]
    no_query = first_q[:, None] >= (q_len if stop is None else stop.clamp(max=q_len))  # [Gq, 1] or [B, 1, Gq, 1]
    found = []
    in_block = block_q // stride
    at_once = in_block * max(1, _AT_ONCE // (batch * heads * len(first_k) * in_block))
    parts = (queries.split(at_once, 2), last_q.split(at_once), no_query.split(at_once, -2))
    for some, last, none in zip(*parts, strict=True):
        grouped = some.reshape(batch, kv_heads, -1, stride * dim)  # the query heads of a group, one after another
        with without_autocast(q.device):
            s = (grouped @ keys.mT).to(dtype).view(batch, heads, len(last), -1) * factor
        dead = no_key | (first_k > last[:, None]) if causal else no_key
        p = s.masked_fill_(dead, -torch.inf).softmax(-1).nan_to_num_(0.0)  # NaN where the group sees nothing
        p = p.masked_fill_(none, 0.0).unflatten(3, (-1, block_k // stride)).sum(4)
        count = (~none).unflatten(-2, (-1, in_block)).sum(-2).clamp(min=1)  # groups in a block: [.., blocks, 1]
        found.append(p.unflatten(2, (-1, in_block)).sum(3) / count)
    return torch.cat(found, 2).log()


def _groups(x: Tensor, block: int, stride: int, lengths: Tensor | None) -> Tensor:
    """Tokens in groups, `[B, H, N, D]` to `[B, H, G, stride, D]`, padded with 0 to whole blocks."""
    if lengths is not None:
        past = torch.arange(x.shape[2], device=x.device) >= lengths.view(-1, 1)
        x = x.masked_fill(past[:, None, :, None], 0.0)
    grouped: Tensor = pad(x, (0, 0, 0, -x.shape[2] % block)).unflatten(2, (-1, stride))
    return grouped

"""The blocks with the highest scores of each query, the earlier of equals, as a list of their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.masks import fused
from sparseflash.masks.tiling.columns import Pool
from sparseflash.selection.frame import Frame

AT_ONCE = 1 << 26  # scores in memory together


def chunks(count: int, per_row: int) -> list[slice]:
    """Slices of `count` rows, of about `AT_ONCE` scores."""
    step = max(1, AT_ONCE // max(1, per_row))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


class Candidates(NamedTuple):
    """The blocks that each query may choose from: those from `begins` to before `stops`, int32 `[Nq]`."""

    begins: Tensor
    stops: Tensor


def candidates_of(frame: Frame, span: int, *, step: int | None = None, whole: bool = False) -> Candidates:
    """Blocks of `span` keys that begin every `step` keys, of a query's document.

    whole: only blocks that have ended, not the one that the query is in.
    """
    step = span if step is None else step
    beyond = step + 1 - span if whole else step
    stops = (frame.new_places + beyond).div(step, rounding_mode="floor").clamp(min=0).to(torch.int32)
    begins = torch.zeros_like(stops) if frame.packing is None else (frame.packing.firsts // step).to(torch.int32)
    return Candidates(begins, stops)


@torch.no_grad()
def summed(
    q: Tensor, k: Tensor, factors: Tensor, of: Candidates, rows: slice, *, scale: float | None = None,
    pool: Pool | None = None,
) -> Tensor:  # fmt: skip
    """Scores `[B, Hkv, rows, Nk]`, summed over the query heads h of a key head:

        sum over h of factors[h, p] * ReLU(q[h, p] . k[s])                without scale: an indexer's
        sum over h of exp(scale * q[h, p] . k[s] - factors[h, p])         with scale: weights, from their lse

    At keys that are no candidates weights are 0. With `pool`, the weights of its blocks.
    """
    if _sums(q, k):
        from sparseflash.masks.fused.summed_scores import summed_scores  # imports Triton

        return summed_scores(q, k, factors, *of, rows.start, rows.stop - rows.start, scale=scale, pool=pool)
    scores = by_operations(q[:, :, rows], k, factors[:, :, rows], None if scale is None else (scale, of, rows))
    return scores if pool is None else _pooled(scores, pool)


def _pooled(weights: Tensor, pool: Pool) -> Tensor:
    """The weights of blocks, from the weights of compressed keys: see `Pool`."""
    width = pool.parts + pool.pieces - 1
    begin = torch.arange(width, device=weights.device)
    share = torch.minimum(begin + 1, width - begin).clamp(max=min(pool.parts, pool.pieces)).to(weights.dtype)
    weights = torch.nn.functional.pad(weights, (pool.pieces - 1, pool.blocks * pool.parts - weights.shape[3]))
    return weights.unfold(-1, width, pool.parts) @ share


def held(q: Tensor, k: Tensor, pool: Pool | None = None) -> int:
    """Scores that `summed` has in memory for a query."""
    if not _sums(q, k):
        return q.shape[0] * q.shape[1] * max(1, k.shape[2])
    return k.shape[0] * k.shape[1] * (k.shape[2] if pool is None else pool.blocks)


def by_operations(
    q: Tensor, k: Tensor, factors: Tensor, weights: tuple[float, Candidates, slice] | None = None
) -> Tensor:  # fmt: skip
    """`summed`, with gradients. weights: the scale, the candidates and which of them these queries are."""
    products = q.unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).mT  # [B, Hkv, group, rows, Nk]
    factors = factors.unflatten(1, (k.shape[1], -1)).unsqueeze(4)
    if weights is None:
        wide = products.relu().to(torch.promote_types(q.dtype, torch.float32))
        return torch.sum(wide * factors, 2)
    scale, of, rows = weights
    number = torch.arange(k.shape[2], device=q.device)
    live = (number >= of.begins[rows, None]) & (number < of.stops[rows, None])
    logits = (products.to(factors.dtype) * scale).masked_fill(~live, -torch.inf)
    return torch.sum((logits - factors.masked_fill(factors == -torch.inf, 0.0)).exp(), 2)


@torch.no_grad()
def best_blocks(
    scores_of: Callable[[slice], Tensor], of: Candidates, *, blocks: int, k: int, per_row: int, first: int = 0,
    last: int = 0,
) -> Tensor:  # fmt: skip
    """Numbers int32 `[B, H, Nq, min(k, blocks)]` of blocks, ascending; at the end -1 where a query has fewer.

    Args:
        scores_of: takes a slice of queries and returns scores `[B, H, rows, blocks]`, of any value for blocks that are
            no candidates.
        per_row: scores that `scores_of` has in memory for a query.
        first, last: candidates at the beginning and at the end that are always chosen.
    """
    k, index, count = min(k, blocks), None, len(of.begins)
    for rows in chunks(count, per_row):
        scores = scores_of(rows)
        if index is None:
            index = torch.empty(*scores.shape[:2], count, k, dtype=torch.int32, device=scores.device)
        if _serves(scores) and scores.dtype in fused.DTYPES:
            from sparseflash.masks.fused.largest import write_largest  # imports Triton

            rows_of = scores.flatten(0, 1).float().contiguous()
            write_largest(rows_of, *of, index.flatten(0, 1), rows.start, first=first, last=last)
        else:
            index[:, :, rows] = _sorted(scores, of.begins[rows, None], of.stops[rows, None], k, first, last)
    assert index is not None
    return index


def _sorted(scores: Tensor, begins: Tensor, stops: Tensor, k: int, first: int, last: int) -> Tensor:
    blocks = scores.shape[3]
    number = torch.arange(blocks, device=scores.device)
    is_open = (number >= begins) & (number < stops)
    forced = is_open & ((number < begins + first) | (number >= stops - last))
    scores = scores.masked_fill(~is_open, -torch.inf).masked_fill(forced, torch.inf)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    chosen = order.masked_fill(scores.gather(-1, order) == -torch.inf, blocks).sort(-1).values
    return chosen.masked_fill(chosen == blocks, -1).to(torch.int32)


def _sums(q: Tensor, k: Tensor) -> bool:
    return _serves(q) and q.dtype == k.dtype and q.shape[3] <= 256 and k.shape[2] > 0


def _serves(x: Tensor) -> bool:
    return x.numel() > 0 and x.dtype in fused.DTYPES and fused.serves(x, 1, 1)


def tokens_of(index: Tensor, span: int) -> Tensor:
    """The tokens of listed blocks, `[..., K]` to `[..., K * span]`; -1 for no block."""
    if span == 1:
        return index
    within = torch.arange(span, dtype=index.dtype, device=index.device)
    return torch.where(index.unsqueeze(-1) < 0, -1, index.unsqueeze(-1) * span + within).flatten(-2)

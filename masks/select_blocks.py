"""Blocks of keys with the highest maximal or mean scores, without the matrix of all scores."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from sparseflash.autocast import without_autocast
from sparseflash.blockmask.arguments import flag, integer
from sparseflash.blockmask.by_name import by_name
from sparseflash.blockmask.running_sums import running_sums
from sparseflash.masks import fused
from sparseflash.masks.pooled_scores import means_of_blocks
from sparseflash.masks.tiling.arguments import at_least
from sparseflash.masks.tiling.chosen import check_queries_and_keys, checked_factor
from sparseflash.masks.tiling.columns import Columns

_AT_ONCE = 1 << 24  # scores that PyTorch's operations hold together
_SPANS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@by_name
@torch.no_grad()
def select_blocks(
    q: Tensor, k: Tensor, *, top_k: int, span: int = 128, block_q: int = 1, reduce: Literal["max", "mean"] = "max",
    causal: bool = False, scale: float | None = None, sink_blocks: int = 0, local_blocks: int = 0,
    cu_seqlens: Any = None,
) -> Tensor:  # fmt: skip
    """The numbers of the `top_k` blocks of keys with the highest scores, for every query or block of queries.

    >>> q, k = torch.randn(1, 4, 200, 32), torch.randn(1, 2, 200, 32)
    >>> index = select_blocks(q, k, top_k=2, span=64, causal=True)  # the list of each query
    >>> index.shape, index.dtype, index[0, 0, 0].tolist()
    (torch.Size([1, 4, 200, 2]), torch.int32, [0, -1])

        score(i, j) = max or mean of scale * q[p] . k[t] over the queries p of block i and the keys t of block j

    in descending order; of equal scores the first block wins. Blocks without a finite score are never chosen, and
    lists with fewer blocks end with -1. If causal, `max` is over the pairs with `t <= p + Nk - Nq`; `mean` is over all
    pairs, as in MoBA, whose own block is chosen by `local_blocks=1`. Blocks without such a pair are no candidates.

    Args:
        q, k: `[B, Hq, Nq, D]` and `[B, Hkv, Nk, D]`, with Hq a multiple of Hkv, those of an indexer if there is one.
        top_k: blocks of a list.
        span: keys of a block, a power of two up to 256.
        block_q: queries that share a list, a power of two up to 128; 1: each has its own.
        causal: no query sees a key after it; the last query is at the last key.
        scale: `1 / sqrt(D)` by default.
        sink_blocks, local_blocks: blocks that always come first, as in `top_k_blocks`; of its own sequence.
        cu_seqlens: running sums of the lengths of sequences that lie one behind the other in q and k, beginning with 0.
            No query sees a key of another sequence. All but the last must be multiples of block_q and of span.

    Returns:
        int32 `[B, Hq, ceil(Nq / block_q), top_k]`: `index` of `grouped.selected_attention` (block_q = 1, one head of q
        for each key head), of `BlockMask.from_block_index`, and of `selected_keys`.

    On a GPU one kernel walks the keys with the best blocks so far in registers, so memory is that of the lists. Lists
    of more than 128 blocks, and those of up to 16 queries of 2,048 keys or more, are chosen from the scores of all
    blocks of some rows at a time. Equal inputs give equal
    lists. In half precision scores are summed in fp32. No gradient flows through the choice; for the scores of chosen
    tokens with gradients see `selected_tokens.token_scores`.

    Source: the maximum over blocks of 128 in MSA (MiniMax-M3, 2026); means in MoBA (Lu et al., 2025).

    Raises ValueError unless `top_k` is at least 1 and at least the number of blocks that a list always keeps.
    """
    check_queries_and_keys(q, k, None)
    top_k = at_least(1, top_k, "top_k", "blocks")
    for value, name, most in ((span, "span", 256), (block_q, "block_q", 128)):
        if integer(value, name, "tokens") not in _SPANS or value > most:
            raise ValueError(f"{name} must be a power of two from 1 to {most}; got {value}.")
    if reduce not in ("max", "mean"):
        raise ValueError(f"reduce must be 'max' or 'mean'; got {reduce!r}.")
    factor = checked_factor(scale, q.shape[3])
    sinks, near = (
        at_least(0, value, name, "blocks")
        for value, name in ((sink_blocks, "sink_blocks"), (local_blocks, "local_blocks"))
    )
    of = Columns(block_q, 1, span, 1, q.shape[2], k.shape[2], flag(causal, "causal"), sinks, near)
    forced = sinks + (2 * near - 1 + block_q // span + (block_q > 1) if near else 0)
    if min(forced, of.blocks) > top_k:
        raise ValueError(
            f"top_k must be at least the {min(forced, of.blocks)} blocks that sink_blocks and local_blocks may keep; "
            f"got {top_k}."
        )
    bounds = bounds_of(cu_seqlens, of, q.device)
    if reduce == "mean":
        if bounds is not None:
            bounds = bounds[:, ::block_q].contiguous()
        q = q.to(torch.promote_types(q.dtype, torch.float32)) if block_q == 1 else means_of_blocks(q, block_q, None)
        k = means_of_blocks(k, span, None)
        of = of._replace(rows=1, row_tokens=block_q, span=1, column_tokens=span)
    return lists_of(q, k, of, top_k, factor, bounds)


def lists_of(
    q: Tensor, k: Tensor, of: Columns, top_k: int, factor: float, bounds: Tensor | None = None, *, in_order: bool = True
) -> Tensor:  # fmt: skip
    """The lists of `select_blocks`, of rows q and columns k.

    bounds: int32 `[2, rows]`, where the document of each row begins and ends, in keys; or None.
    in_order: in descending order of scores; otherwise in any order, with -1 at the end.
    """
    with torch.no_grad(), without_autocast(q.device):
        if fused.serves(q, 1, 1) and q.dtype in fused.DTYPES and q.dtype == k.dtype and q.shape[3] <= 256:
            # These import Triton.
            from sparseflash.masks.fused.block_scores import lists_by_scores
            from sparseflash.masks.fused.select import fits, is_long_walk, lists_of_blocks

            if fits(q, of):
                if top_k > fused.LONGEST_LIST or is_long_walk(q, k):
                    return lists_by_scores(q, k, of, top_k, factor, bounds, in_order)
                return lists_of_blocks(q, k, of, top_k, factor, bounds)
        return _by_operations(q, k, of, top_k, factor, bounds)


def bounds_of(cu_seqlens: Any, of: Columns, device: torch.device) -> Tensor | None:
    """Where the document of each query begins and ends, as `lists_of` takes them; None without documents."""
    if cu_seqlens is None:
        return None
    sums = running_sums(cu_seqlens, "cu_seqlens")
    if sums[-1] != of.q_len or of.q_len != of.k_len:
        raise ValueError(
            f"cu_seqlens must end with the number of tokens of q and of k, {of.q_len} and {of.k_len}; got {sums[-1]}."
        )
    step = max(of.rows, of.span)
    if any(each % step for each in sums[:-1]):
        raise ValueError(
            f"cu_seqlens must be multiples of {step}, of block_q and span, except for the last; got {sums}. Leave room "
            "between the sequences."
        )
    ends = torch.tensor(sums, device="cpu")
    bounds = torch.stack([ends[:-1], ends[1:]]).repeat_interleave(ends.diff(), 1)
    return bounds.to(device=device, dtype=torch.int32)


def _by_operations(q: Tensor, k: Tensor, of: Columns, top_k: int, factor: float, bounds: Tensor | None) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    (batch, heads, rows, _), group = q.shape, q.shape[1] // k.shape[1]
    keys = k.to(wide).repeat_interleave(group, 1).mT
    most = max(1, _AT_ONCE // max(1, batch * heads * keys.shape[3] * of.rows)) * of.rows
    found = [
        _lists(q[:, :, start : start + most], keys, start, of, top_k, factor, bounds)
        for start in range(0, rows, most)
    ]  # fmt: skip
    return torch.cat(found, 2)


def _lists(
    q: Tensor, keys: Tensor, start: int, of: Columns, top_k: int, factor: float, bounds: Tensor | None
) -> Tensor:  # fmt: skip
    device, shift = q.device, of.k_len - of.q_len
    scores = (q.to(keys.dtype) @ keys) * factor
    rows, cols = scores.shape[2:]
    last = ((start + torch.arange(1, rows + 1, device=device)) * of.row_tokens).clamp(max=of.q_len) - 1 + shift
    token = torch.arange(cols, device=device) * of.column_tokens
    dead = scores.isnan()
    if of.causal:
        dead = dead | (token > last[:, None])
    own = None if bounds is None else bounds[:, start : start + rows].long()
    if own is not None:
        dead = dead | (token < own[0][:, None]) | (token >= own[1][:, None])
    scores = scores.masked_fill(dead, -torch.inf)
    padding = (0, -cols % of.span, 0, -rows % of.rows)
    scores = torch.nn.functional.pad(scores, padding, value=-torch.inf)
    scores = scores.unflatten(3, (-1, of.span)).amax(4).unflatten(2, (-1, of.rows)).amax(3)  # [B, H, lists, blocks]

    size = of.rows * of.row_tokens
    first = start * of.row_tokens + torch.arange(scores.shape[2], device=device) * size
    ends = torch.stack([first, (first + size).clamp(max=of.q_len) - 1]) + shift
    block = torch.arange(scores.shape[3], device=device)
    of_lists = None if own is None else own[:, :: of.rows, None]
    forced = _forced_blocks(block, ends[0][:, None], ends[1][:, None], of, of_lists)
    scores = torch.where(scores > -torch.inf, scores.clamp(max=torch.finfo(scores.dtype).max), scores)
    scores = scores.masked_fill(forced, torch.inf)
    best, index = scores.sort(dim=-1, descending=True, stable=True)
    index = index.masked_fill(best == -torch.inf, -1)[..., :top_k].to(torch.int32)
    return torch.nn.functional.pad(index, (0, top_k - index.shape[3]), value=-1)


def _forced_blocks(block: Tensor, first: Tensor, last: Tensor, of: Columns, bounds: Tensor | None) -> Tensor:
    tokens = of.span * of.column_tokens
    if bounds is not None:  # a query at the end of a cache is counted from its last key
        first, last = (torch.minimum(x, bounds[1] - 1) for x in (first, last))
    own_first, own_last = (torch.div(x, tokens, rounding_mode="floor") for x in (first, last))
    near = (block > own_first - of.near) & (block < own_last + (1 if of.causal else of.near)) & (of.near > 0)
    open_ = (block * tokens <= last) if of.causal else torch.ones_like(near)
    if bounds is None:
        return ((block < of.sinks) | near) & open_
    open_ = open_ & (block * tokens >= bounds[0]) & (block * tokens < bounds[1])
    return ((block < bounds[0] // tokens + of.sinks) | near) & open_

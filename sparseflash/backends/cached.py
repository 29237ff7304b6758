"""Few queries against a KV cache, in plain PyTorch.

`live_keys` defines which keys are live, also for the kernels in `triton/decode`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflash.backends import reference
from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.csr import take_rows
from sparseflash.scores.change import Place, Scores


@dataclass(frozen=True)
class Cached:
    """With `n = lengths[b]` tokens in the cache (never more than it has room for), query i of Nq is token
    `p = n - Nq + i`. Key t of key head h is live iff

        starts[b] <= t <= p   and   (t > p - window  or  t < starts[b] + sinks)   (if there is a window)
        and  t // page is in pages[b, h]   (if pages are chosen)   and   live[h, p, t] of the mask   (if there is one)
    """

    lengths: Tensor  # integers [B]
    starts: Tensor | None = None  # integers [B]
    window: int | None = None
    sinks: int = 0
    page: int = 0  # tokens of a page; 0 without pages
    block_table: Tensor | None = None  # integers [B, n]: the pages of each sequence; None: the cache is contiguous
    pages: Tensor | None = None  # int32 or int64 [B, Hkv, K]: the chosen pages, each once, -1 for none
    mask: BlockMask | None = None
    changes: Scores | None = None

    def capacity(self, k_cache: Tensor) -> int:
        return k_cache.shape[2] if self.block_table is None else self.block_table.shape[1] * self.page


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, of: Cached, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out [B, Hq, Nq, Dv], lse [B, Hq, Nq])`, computed in fp32 or, for fp64, in fp64."""
    k, v = (x if of.block_table is None else _gathered(x, of.block_table) for x in (k_cache, v_cache))
    live = live_keys(of, q.shape, k.shape[1], k.shape[2])
    # Dead keys and values need not be finite: that memory may never have been written.
    used = (live.any(2) if live.shape[1] == k.shape[1] else live.any(2).any(1, keepdim=True)).unsqueeze(-1)
    k, v = (torch.where(used, x, 0) for x in (k, v))
    if live.shape[1] not in (1, q.shape[1]):
        live = live.repeat_interleave(q.shape[1] // live.shape[1], 1)
    precise = torch.promote_types(q.dtype, torch.float32)
    wide, changes, at = q.to(precise), of.changes, None
    if changes is not None:
        if (temperature := changes.find("temperature")) is not None:  # of the queries, not of their positions
            wide, changes = temperature.applied_to(wide), changes.without("temperature")
        everywhere = Place.everywhere((*q.shape[:3], k.shape[2]), q.device)
        at = everywhere._replace(query=positions(of, q.shape[2], k.shape[2]).clamp(min=0), shift=0)
    out, lse = reference.attention_of_live(wide, k.to(precise), v.to(precise), live, scale, changes=changes, at=at)
    return out.to(q.dtype), lse


def positions(of: Cached, q_len: int, k_len: int) -> Tensor:
    """The position of each query, int64 `[B, 1, Nq, 1]`; below 0 before a sequence begins."""
    length = of.lengths.view(-1, 1, 1, 1).long().clamp(0, k_len)
    return length - q_len + torch.arange(q_len, device=of.lengths.device).view(-1, 1)


def live_keys(of: Cached, shape: torch.Size, kv_heads: int, k_len: int) -> Tensor:
    """Which keys each query sees: bool `[B, 1 or Hkv or Hq, Nq, k_len]`; q has `shape`."""
    q_len, device = shape[2], of.lengths.device
    position = positions(of, q_len, k_len)
    key = torch.arange(k_len, device=device)
    start = position.new_zeros(()) if of.starts is None else of.starts.view(-1, 1, 1, 1).long().clamp(0, k_len)
    live = (key <= position) & (key >= start)
    if of.window is not None:
        live &= (key > position - of.window) | (key < start + of.sinks)
    if of.pages is not None:
        chosen = torch.zeros(*of.pages.shape[:2], -(-k_len // of.page) + 1, dtype=torch.bool, device=device)
        # Numbers of pages that do not exist are sent to a dummy entry past the last page.
        last = chosen.shape[2] - 1
        named = torch.where((of.pages < 0) | (of.pages >= last), last, of.pages.long())
        chosen = chosen.scatter_(2, named, True)[..., :last].repeat_interleave(of.page, 2)[..., :k_len]
        live = live & chosen.unsqueeze(2)
    if of.mask is not None:
        rows = rows_of(of.mask, position[:, 0, :, 0].clamp(min=0))[..., :k_len]
        if rows.shape[1] not in (1, kv_heads) and live.shape[1] != 1:
            live = live.repeat_interleave(rows.shape[1] // live.shape[1], 1)
        live = live & rows
    return live


def rows_of(mask: BlockMask, positions: Tensor) -> Tensor:
    """The rows of a mask at some query positions, int64 `[B, n]`: bool `[B, H or 1, n, Mk * block_k]`.

    >>> from sparseflash import masks
    >>> rows_of(masks.causal(40, block=16), torch.tensor([[2, 33]]))[0, 0].sum(-1).tolist()
    [3, 34]
    """
    (row_blocks, col_blocks), (batch, n) = mask.blocks, positions.shape
    pattern = mask.pattern.long().expand(batch, -1).unsqueeze(-1)  # [B, H, 1]
    row = pattern * row_blocks + torch.div(positions, mask.block_q, rounding_mode="floor").unsqueeze(1)
    which, entry = take_rows(mask.indptr, row.reshape(-1))
    inner = (positions % mask.block_q).unsqueeze(1).expand(row.shape).reshape(-1)[which]
    kind = mask.tile[entry].long()
    words = mask.words.view(-1, mask.block_q, bitmask.words_per_row(mask.block_k))[(kind - 1).clamp(min=0), inner]
    words = torch.where(kind.unsqueeze(-1) > 0, words, bitmask.full_word(mask.block_k))
    live = torch.zeros(row.numel(), col_blocks, mask.block_k, dtype=torch.bool, device=positions.device)
    live[which, mask.indices[entry].long()] = bitmask.unpack(words.unsqueeze(1), mask.block_k).squeeze(1)
    return live.view(batch, row.shape[1], n, col_blocks * mask.block_k)


def _gathered(cache: Tensor, block_table: Tensor) -> Tensor:
    """The pages of each sequence concatenated, `[B, Hkv, n * page, D]`. Page numbers are clamped: the table may hold
    anything for pages that are not in use yet.
    """
    pages = cache[block_table.long().clamp(0, cache.shape[0] - 1)]  # [B, n, Hkv, page, D]
    return pages.transpose(1, 2).flatten(2, 3)

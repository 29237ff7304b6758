"""The number of patterns, live scores and live tokens of a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseflash.blockmask import bitmask
from sparseflash.blockmask.build import SCORES_AT_ONCE
from sparseflash.blockmask.csr import stored_tiles

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask


def pattern_count(mask: BlockMask) -> int:
    """The number of distinct patterns."""
    return (len(mask.indptr) - 1) // mask.blocks[0]


def live_tokens(mask: BlockMask) -> list[tuple[int, int]]:
    """The numbers of live queries and keys of each batch element; synchronises with the device if it has lengths."""
    if mask.lengths is None:
        return [(mask.q_len, mask.k_len)] * mask.shape[0]
    return [(q, k) for q, k in mask.lengths.T.tolist()]


def live_scores(mask: BlockMask) -> float:
    """Live scores per head, averaged over heads and batch elements."""
    row_blocks, patterns = mask.blocks[0], pattern_count(mask)
    a_tile = torch.cat([mask.bits.new_tensor([mask.block_q * mask.block_k]).long(), bitmask.live_scores(mask.bits)])
    stored = stored_tiles(mask)
    if mask.lengths is None:
        rows, _, tile = stored
        per_pattern = torch.zeros(patterns, dtype=torch.int64, device=mask.device)
        per_pattern.index_add_(0, rows // row_blocks, a_tile[tile])
        return float(per_pattern[mask.pattern.long()].double().mean())
    batch = mask.shape[0]
    pattern = mask.pattern.expand(batch, -1)
    total = 0.0
    for b, stops in enumerate(live_tokens(mask)):
        per_pattern = _live_scores_to(mask, *stops, stored, a_tile, patterns)
        total += float(per_pattern[pattern[b].long()].double().mean())
    return total / max(batch, 1)


def _live_scores_to(
    mask: BlockMask, q_stop: int, k_stop: int, stored: tuple[Tensor, Tensor, Tensor], a_tile: Tensor, patterns: int
) -> Tensor:
    """Live scores of each pattern among the first `q_stop` queries and `k_stop` keys: int64 `[P]`."""
    row_blocks = mask.blocks[0]
    rows, j, tile = stored
    i = rows % row_blocks
    inside = ((i + 1) * mask.block_q <= q_stop) & ((j + 1) * mask.block_k <= k_stop)
    cut = ~inside & (i * mask.block_q < q_stop) & (j * mask.block_k < k_stop)
    count = torch.zeros(patterns, dtype=torch.int64, device=mask.device)
    count.index_add_(0, rows[inside] // row_blocks, a_tile[tile[inside]])
    words = bitmask.choices(mask.bits, mask.block_k)
    for e in cut.nonzero().squeeze(1).split(max(1, SCORES_AT_ONCE // (mask.block_q * mask.block_k))):
        q = i[e, None, None] * mask.block_q + torch.arange(mask.block_q, device=mask.device)[:, None]
        k = j[e, None, None] * mask.block_k + torch.arange(mask.block_k, device=mask.device)
        live = bitmask.unpack(words[tile[e]], mask.block_k) & (q < q_stop) & (k < k_stop)
        count.index_add_(0, rows[e] // row_blocks, live.sum((-2, -1)))
    return count

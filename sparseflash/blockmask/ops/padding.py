"""Padding as bits: writes the lengths of a mask into its tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.ops.tilelist import TileList, in_chunks, mask_of, take_patterns
from sparseflash.blockmask.stats import pattern_count
from sparseflash.blockmask.unique import distinct, number_by_first_appearance


def bake_lengths(mask: BlockMask) -> BlockMask:
    """See `BlockMask.bake_lengths`."""
    if mask.lengths is None:
        return mask
    if mask.lengths.shape[1] == 0:
        raise ValueError("lengths must have at least one sequence to be written into the tiles; got none.")
    batch, heads = mask.shape[:2]
    row_blocks = mask.blocks[0]
    # One new pattern for each (pattern, live queries, live keys) that occurs.
    cuts, cut_of = torch.unique(mask.lengths.long(), dim=1, return_inverse=True)  # [2, C], [B]
    pair = mask.pattern.long() + cut_of[:, None] * pattern_count(mask)
    number, first = number_by_first_appearance(pair.reshape(-1))
    chosen = pair.reshape(-1)[first]
    q_stops, k_stops = cuts[:, chosen // pattern_count(mask)]
    row, entry = take_patterns(mask, chosen % pattern_count(mask))
    col, kind = mask.indices[entry].long(), mask.tile[entry].long()
    # The numbers of queries and keys of each tile that come before the end.
    live_q = (q_stops[row // row_blocks] - row % row_blocks * mask.block_q).clamp(max=mask.block_q)
    live_k = (k_stops[row // row_blocks] - col * mask.block_k).clamp(max=mask.block_k)
    kept = (live_q > 0) & (live_k > 0)
    row, col, kind, live_q, live_k = (x[kept] for x in (row, col, kind, live_q, live_k))
    cut = (live_q < mask.block_q) | (live_k < mask.block_k)
    span = (mask.block_q + 1) * (mask.block_k + 1)
    recipes, which = distinct(kind[cut] * span + live_q[cut] * (mask.block_k + 1) + live_k[cut])
    known = bitmask.choices(mask.bits, mask.block_k)

    def cut_words(recipe: Tensor) -> Tensor:
        live_q, live_k = recipe % span // (mask.block_k + 1), recipe % (mask.block_k + 1)
        inside = _first(live_q, live_k, mask.block_q, mask.block_k)
        return known[recipe // span] & inside

    words = in_chunks(cut_words, recipes, known[0].numel())
    kind[cut] = which + 1 + len(mask.bits)
    made = TileList(
        mask.q_len, mask.k_len, mask.block_q, mask.block_k,
        row, col, kind, torch.cat([mask.bits, words]), number.view(batch, heads), len(first),
    )  # fmt: skip
    return mask_of(made)


def _first(live_q: Tensor, live_k: Tensor, block_q: int, block_k: int) -> Tensor:
    """The words `[E, block_q, W]` of tiles whose first `live_q[e]` queries and first `live_k[e]` keys are live."""
    width = min(bitmask.WORD, block_k)
    starts = torch.arange(0, block_k, width, device=live_k.device)
    bits = (live_k[:, None] - starts).clamp(0, width)
    keys = ((1 << bits) - 1).to(torch.int32)  # [E, W]; 2^32 - 1 wraps to -1: every score
    queries = torch.arange(block_q, device=live_q.device) < live_q[:, None]  # [E, block_q]
    return torch.where(queries[:, :, None], keys[:, None, :], 0)

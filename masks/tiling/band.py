"""Bands: masks that depend on the distance between query and key only, and on that through an interval.

What causal and sliding-window patterns share. Tiles are listed, never scanned, and bits are made once a distinct
distance, so time and memory go with the live tiles.
"""

from __future__ import annotations

import torch

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, block_pair, token_counts
from sparseflash.blockmask.unique import distinct
from sparseflash.masks.tiling.listing import between


def band(q_len: int, k_len: int, lowest: int, highest: int | None, *, shift: int = 0, block: Block = 128) -> BlockMask:
    """Score (q, k) is live iff `lowest <= q + shift - k <= highest`; `highest=None` has no upper bound. In tokens."""
    block_q, block_k = block_pair(block)
    q_len, k_len = token_counts(q_len, k_len)
    highest = q_len + k_len + abs(shift) if highest is None else highest
    first_q = torch.arange(0, q_len, block_q, device="cpu")
    last_q = (first_q + block_q - 1).clamp(max=q_len - 1)
    first_col = torch.div(first_q + shift - highest, block_k, rounding_mode="floor").clamp(min=0)
    last_col = torch.div(last_q + shift - lowest, block_k, rounding_mode="floor").clamp(max=-(-k_len // block_k) - 1)
    rows, cols = between(first_col, last_col)
    # Tiles whose corners lie at the same distance hold the same scores.
    corner = rows * block_q + shift - cols * block_k
    full = (corner - (block_k - 1) >= lowest) & (corner + block_q - 1 <= highest)
    distances, which = distinct(corner[~full])
    q, k = torch.arange(block_q, device="cpu")[:, None], torch.arange(block_k, device="cpu")
    distance = distances[:, None, None] + q - k
    tile = torch.zeros_like(rows)
    tile[~full] = which + 1
    live = (distance >= lowest) & (distance <= highest)
    return BlockMask.from_tiles(rows, cols, q_len, k_len, block=block, tile=tile, live=live)

"""Diagonals: masks of a set of distances between query and key.

Tiles are listed, never scanned; bits are made a word at a time, once for each distinct distance between tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import Block, block_pair, token_counts
from sparseflash.blockmask.build import arrays_of
from sparseflash.blockmask.unique import distinct
from sparseflash.masks.tiling.listing import between


def diagonals(offsets: Tensor, q_len: int, *, block: Block = 128) -> BlockMask:
    """Score (q, k) is live iff `q - k` is one of `offsets`: int64 `[S]`, tokens, strictly increasing, any values."""
    block_q, block_k = block_pair(block)
    q_len, _ = token_counts(q_len, q_len)
    rows, cols = tiles_at(offsets, q_len, block_q, block_k)
    corners, which = distinct(rows * block_q - cols * block_k)
    part = (rows, cols, which + 1, words_at(offsets, corners, block_q, block_k))
    return BlockMask(q_len, q_len, block_q, block_k, *arrays_of(q_len, q_len, block_q, block_k, [part], 1, 1))


def tiles_at(offsets: Tensor, q_len: int, block_q: int, block_k: int) -> tuple[Tensor, Tensor]:
    """`(rows, cols)` of the tiles that one of the diagonals crosses, sorted; some may lie past the ends of the
    diagonal.
    """
    offsets = offsets[(offsets > -q_len) & (offsets < q_len)]
    row_blocks, col_blocks = -(-q_len // block_q), -(-q_len // block_k)
    if len(offsets) == 0:
        return offsets, offsets
    # A tile holds block_q + block_k - 1 successive distances. So no tile lies between two diagonals that are at most
    # that far apart: they form one band, and no tile is crossed by two bands.
    gap = (offsets.diff() > block_q + block_k - 1).nonzero()[:, 0]
    nearest = offsets[torch.cat([gap.new_zeros(1), gap + 1])].flip(0)
    farthest = offsets[torch.cat([gap, gap.new_full((1,), len(offsets) - 1)])].flip(0)
    first_q = (torch.arange(row_blocks, device="cpu") * block_q)[:, None]
    last_q = (first_q + block_q - 1).clamp(max=q_len - 1)
    first = (first_q - farthest).div(block_k, rounding_mode="floor").clamp(min=0)  # [Mq, bands]
    last = (last_q - nearest).div(block_k, rounding_mode="floor").clamp(max=col_blocks - 1)
    at, cols = between(first.reshape(-1), last.reshape(-1))
    return at // len(nearest), cols


def words_at(offsets: Tensor, corners: Tensor, block_q: int, block_k: int) -> Tensor:
    """Words `[C, block_q, W]` of tiles; `corners [C]` are the distances in their first scores."""
    words_per_row, bits = bitmask.words_per_row(block_k), min(bitmask.WORD, block_k)
    if len(corners) == 0:
        return torch.zeros(0, block_q, words_per_row, dtype=torch.int32, device="cpu")
    # Row r of a tile is a window on the set of distances, read backwards; so are its words.
    low, high = int(corners.min()) - block_k + 1, int(corners.max()) + block_q - 1
    inside = offsets[(offsets >= low) & (offsets <= high)]
    backwards = torch.zeros(high - low + 1, dtype=torch.bool, device="cpu")
    backwards[high - inside] = True
    windows = backwards.unfold(0, bits, 1)
    word_from = torch.cat([bitmask.pack(some)[:, 0] for some in windows.split(1 << 16)])
    # In portions, because the looked-up indices take twice the memory of the words.
    row = torch.arange(block_q, device="cpu")[:, None] - torch.arange(words_per_row, device="cpu") * bits
    words = [word_from[high - (some[:, None, None] + row)] for some in corners.split(1 << 10)]
    return torch.cat(words)

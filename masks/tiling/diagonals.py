"""Diagonals: masks of a set of distances between query and key.

Tiles are listed, never scanned; bits are made a word at a time, once for each distinct distance between tiles.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import Block, block_pair, token_counts
from sparseflash.blockmask.build import arrays_of_rows
from sparseflash.blockmask.patterns import starts_of
from sparseflash.masks.tiling.draws import Integers
from sparseflash.masks.tiling.listing import columns_between, ranges


def diagonals(offsets: Tensor, q_len: int, *, block: Block = 128) -> BlockMask:
    """Score (q, k) is live iff `q - k` is one of `offsets`: int64 `[S]`, tokens, strictly increasing, any values."""
    block_q, block_k = block_pair(block)
    q_len, _ = token_counts(q_len, q_len)
    offsets = offsets[(offsets > -q_len) & (offsets < q_len)]
    first, last = (x.reshape(-1) for x in _columns(offsets, q_len, block_q, block_k))
    counts = np.maximum(last - first + 1, 0)
    row_blocks, step = -(-q_len // block_q), min(block_q, block_k)
    bands = len(first) // row_blocks
    indptr = starts_of(counts.reshape(row_blocks, bands).sum(1))
    cols, kind = (np.empty(indptr[-1], dtype=np.int32) for _ in range(2))
    # Tiles at one distance hold the same scores. All distances of first scores are multiples of `step`, in order:
    ends = offsets[[0, -1]].tolist() if len(offsets) else (0, 0)
    lowest, highest = (ends[0] - block_q) // step, (ends[1] + block_k) // step
    of_row = (np.arange(row_blocks) * (block_q // step) + (1 - lowest)).astype(np.int32).repeat(bands)
    for rows, places, some in ranges(first, last):
        cols[places] = some
        np.subtract(of_row[rows].repeat(counts[rows]), some * (block_k // step), out=kind[places])

    def words_of(kinds: Integers) -> Tensor:
        return words_at(offsets, torch.from_numpy((kinds + lowest) * step), block_q, block_k)

    arrays = arrays_of_rows(q_len, q_len, block_q, block_k, indptr, cols, kind, highest - lowest + 1, words_of)
    return BlockMask(q_len, q_len, block_q, block_k, *arrays)


def tiles_at(offsets: Tensor, q_len: int, block_q: int, block_k: int) -> tuple[Tensor, Tensor]:
    """`(rows, cols)` of the tiles that one of the diagonals crosses, sorted; some may lie past the ends of the
    diagonal.
    """
    first, last = _columns(offsets, q_len, block_q, block_k)
    at, cols = columns_between(first.reshape(-1), last.reshape(-1))
    return torch.from_numpy(at // max(1, first.shape[1])), torch.from_numpy(cols)


def _columns(offsets: Tensor, q_len: int, block_q: int, block_k: int) -> tuple[Integers, Integers]:
    """The first and the last column, `[Mq, bands]` each, of the tiles in which a block row meets a band of diagonals;
    ascending, and none twice.
    """
    row_blocks, col_blocks = -(-q_len // block_q), -(-q_len // block_k)
    if len(offsets) == 0:
        return (np.zeros((row_blocks, 0), dtype=np.int64),) * 2
    # A tile holds block_q + block_k - 1 successive distances. So no tile lies between two diagonals that are at most
    # that far apart: they form one band, and no tile is crossed by two bands.
    gap = (offsets.diff() > block_q + block_k - 1).nonzero()[:, 0]
    nearest = offsets[torch.cat([gap.new_zeros(1), gap + 1])].flip(0)
    farthest = offsets[torch.cat([gap, gap.new_full((1,), len(offsets) - 1)])].flip(0)
    first_q = (torch.arange(row_blocks, device="cpu") * block_q)[:, None]
    last_q = (first_q + block_q - 1).clamp(max=q_len - 1)
    first = (first_q - farthest).div(block_k, rounding_mode="floor").clamp(min=0)  # [Mq, bands]
    last = (last_q - nearest).div(block_k, rounding_mode="floor").clamp(max=col_blocks - 1)
    return first.numpy(), last.numpy()


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

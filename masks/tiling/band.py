"""Bands: masks in which a score is live iff the distance between query and key lies in an interval.

Tiles are listed, never scanned, and bits are made once for each distinct distance, so time and memory are proportional
to the live tiles.
"""

from __future__ import annotations

import numpy as np
import torch

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import Block, block_pair, token_counts
from sparseflash.blockmask.build import TILES_AT_ONCE, arrays_of
from sparseflash.masks.tiling.listing import columns_between


def band(q_len: int, k_len: int, lowest: int, highest: int | None, *, shift: int = 0, block: Block = 128) -> BlockMask:
    """Score (q, k) is live iff `lowest <= q + shift - k <= highest`; `highest=None` has no upper bound. In tokens."""
    block_q, block_k = block_pair(block)
    q_len, k_len = token_counts(q_len, k_len)
    reach = q_len + k_len + abs(shift)
    lowest = max(lowest, -reach)
    highest = reach if highest is None else min(highest, reach)
    first_q = np.arange(0, q_len, block_q) + shift
    last_q = np.minimum(first_q + (block_q - 1), q_len - 1 + shift)
    first_col = np.maximum((first_q - highest) // block_k, 0)
    last_col = np.minimum((last_q - lowest) // block_k, -(-k_len // block_k) - 1)
    rows, cols = columns_between(first_col, last_col)
    cut, corners = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for start in range(0, len(rows), TILES_AT_ONCE):
        i, j = (x[start : start + TILES_AT_ONCE] for x in (rows, cols))
        corner = first_q[i] - j * block_k
        partial = np.flatnonzero((corner - (block_k - 1) < lowest) | (corner + (block_q - 1) > highest))
        cut.append(partial + start)
        corners.append(corner[partial])
    distances, which = np.unique(np.concatenate(corners), return_inverse=True)
    tile = np.zeros(len(rows), dtype=np.int64)
    tile[np.concatenate(cut)] = which + 1
    of_row = distances[:, None] + np.arange(block_q)
    words = bitmask.below(of_row - (lowest - 1), block_k) & ~bitmask.below(of_row - highest, block_k)
    part = (torch.from_numpy(rows), torch.from_numpy(cols), torch.from_numpy(tile), torch.from_numpy(words))
    return BlockMask(q_len, k_len, block_q, block_k, *arrays_of(q_len, k_len, block_q, block_k, [part], 1, 1))

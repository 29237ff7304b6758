"""Bands: masks in which a score is live iff the distance between query and key lies in an interval.

Tiles are listed, never scanned, and bits are made once for each distinct distance, so time and memory are proportional
to the live tiles.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import Block, block_pair, token_counts
from sparseflash.blockmask.build import arrays_of_rows
from sparseflash.blockmask.recorded import Runs, mask_of_runs
from sparseflash.masks.tiling.draws import Integers
from sparseflash.masks.tiling.listing import cut_columns, rows_of


def band(q_len: int, k_len: int, lowest: int, highest: int | None, *, shift: int = 0, block: Block = 128) -> BlockMask:
    """Score (q, k) is live iff `lowest <= q + shift - k <= highest`; `highest=None` has no upper bound. In tokens."""
    block_q, block_k = block_pair(block)
    q_len, k_len = token_counts(q_len, k_len)
    reach = q_len + k_len + abs(shift)
    lowest = max(lowest, -reach)
    highest = reach if highest is None else min(highest, reach)

    def runs() -> Runs:
        q = np.arange(shift, shift + q_len)
        return Runs(q_len, k_len, (block_q, block_k), np.stack([q - highest, q - (lowest - 1), q * 0, q * 0]))

    return mask_of_runs(runs, lambda: _made(q_len, k_len, lowest, highest, shift, block_q, block_k))


def _made(q_len: int, k_len: int, lowest: int, highest: int, shift: int, block_q: int, block_k: int) -> BlockMask:
    first_q = np.arange(0, q_len, block_q) + shift
    last_q = np.minimum(first_q + (block_q - 1), q_len - 1 + shift)
    first = np.maximum((first_q - highest) // block_k, 0)
    last = np.minimum((last_q - lowest) // block_k, -(-k_len // block_k) - 1)
    indptr, listed = rows_of(first, last)
    first_full = -((highest - (block_q - 1) - first_q) // block_k)
    rows, cols = cut_columns(first, last, first_full, (first_q - (lowest + block_k - 1)) // block_k)
    distances, which = np.unique(first_q[rows] - cols * block_k, return_inverse=True)
    kind = np.zeros(len(listed), dtype=np.int32)
    kind[(indptr[:-1] - first)[rows] + cols] = which + 1

    def words_of(kinds: Integers) -> Tensor:
        of_row = distances[kinds, None] + np.arange(block_q)
        words = bitmask.below(of_row - (lowest - 1), block_k) & ~bitmask.below(of_row - highest, block_k)
        return torch.from_numpy(words)

    arrays = arrays_of_rows(q_len, k_len, block_q, block_k, indptr, listed, kind, len(distances), words_of)
    return BlockMask(q_len, k_len, block_q, block_k, *arrays)

"""Masks that depend on the distance between query and key only: bits are made once a distinct distance of tiles."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.checks import Block, block_pair

SCORES_AT_ONCE = 1 << 23


def by_distance(
    live: Callable[[Tensor], Tensor], rows: Tensor, cols: Tensor, q_len: int, k_len: int | None = None, *,
    shift: int = 0, block: Block = 128,
) -> BlockMask:  # fmt: skip
    """Score (q, k) is live iff `live(q + shift - k)` and its tile is listed; a tile may be listed more than once.

    `rows`, `cols`: int `[E]`, the candidate tiles, which must cover every live score. `live` takes an int64 tensor of
    distances, in tokens, and returns bools; tiles whose corners are equally far apart are looked at once.
    """
    block_q, block_k = block_pair(block)
    k_len = q_len if k_len is None else k_len
    key = torch.unique(rows * -(-k_len // block_k) + cols)
    rows, cols = key // -(-k_len // block_k), key % -(-k_len // block_k)
    corners, which = torch.unique(rows * block_q + shift - cols * block_k, return_inverse=True)
    inside = torch.arange(block_q)[:, None] - torch.arange(block_k)
    found = [
        live(some[:, None, None] + inside) for some in corners.split(max(1, SCORES_AT_ONCE // (block_q * block_k)))
    ]
    kinds = torch.cat(found) if found else torch.zeros(0, block_q, block_k, dtype=torch.bool)
    return BlockMask.from_tiles(rows, cols, q_len, k_len, block=block, tile=which + 1, live=kinds)

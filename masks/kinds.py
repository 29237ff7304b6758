"""Masks whose tiles are of few kinds, which the pattern can name: bits are made once a kind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparseflash import tiles
from sparseflash.blockmask import BlockMask
from sparseflash.building import SCORES_AT_ONCE, arrays_of
from sparseflash.checks import Block, block_pair, token_counts


def by_kind(
    live: Callable[[Tensor, Tensor], Tensor], rows: Tensor, cols: Tensor, kind: Tensor, q_len: int, *,
    block: Block = 128,
) -> BlockMask:  # fmt: skip
    """Score (q, k) is live iff `live(q, k)` and its tile is listed, where tiles of equal `kind` hold the same scores.

    `rows`, `cols`, `kind`: int64 `[E]`, each tile once. `live` is asked about one tile of each kind, also about
    positions past the end, which are dropped afterwards.
    """
    block_q, block_k = block_pair(block)
    q_len, _ = token_counts(q_len, q_len)
    kinds, which = torch.unique(kind, return_inverse=True)
    # The first tile of each kind, so that the same one is asked about on every machine.
    first = torch.full_like(kinds, len(kind)).scatter_reduce_(0, which, torch.arange(len(kind)), "amin")
    words = [torch.zeros(0, block_q, tiles.words_per_row(block_k), dtype=torch.int32)]
    for some in first.split(max(1, SCORES_AT_ONCE // (block_q * block_k))):
        q = rows[some][:, None, None] * block_q + torch.arange(block_q)[:, None]
        k = cols[some][:, None, None] * block_k + torch.arange(block_k)
        words.append(tiles.pack(live(q, k).expand(-1, block_q, block_k)))
    part = (rows, cols, which + 1, torch.cat(words))
    return BlockMask(q_len, q_len, block_q, block_k, *arrays_of(q_len, q_len, block_q, block_k, [part], 1, 1))

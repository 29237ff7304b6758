"""Conversions between lists of tiles and lists of single scores."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask import bitmask
from sparseflash.blockmask.build import SCORES_AT_ONCE, Part


def scores_of(part: Part, block_q: int, block_k: int) -> tuple[Tensor, Tensor]:
    """The live scores of a list of tiles: the query and key of each, int64 `[n]`, tile by tile."""
    rows, cols = part[:2]
    found = []
    for e in torch.arange(len(rows), device=rows.device).split(max(1, SCORES_AT_ONCE // (block_q * block_k))):
        which, q, k = blocks_of(part, e, block_q, block_k).nonzero(as_tuple=True)
        found.append((rows[e][which] * block_q + q, cols[e][which] * block_k + k))
    return torch.cat([q for q, _ in found]), torch.cat([k for _, k in found])


def blocks_of(part: Part, entries: Tensor, block_q: int, block_k: int) -> Tensor:
    """The scores of the given entries of a list of tiles: bool `[n, block_q, block_k]`."""
    tile, words = part[2][entries], part[3]
    kinds, which = torch.unique(tile, return_inverse=True)
    repeat = len(kinds) < len(tile)
    packed = bitmask.choices(words, block_k)[kinds if repeat else tile]
    live = torch.empty(len(packed), block_q, block_k, dtype=torch.bool, device=words.device)
    at_once = max(1, SCORES_AT_ONCE // (block_q * block_k))
    for some, out in zip(packed.split(at_once), live.split(at_once), strict=True):
        out.copy_(bitmask.unpack(some, block_k))
    return live[which] if repeat else live


def part_of_scores(q: Tensor, k: Tensor, q_len: int, k_len: int, block_q: int, block_k: int) -> Part:
    """The tiles with these live scores, which must be distinct (int64 `[n]`, in any order)."""
    for name, ids, stop in (("rows", q, q_len), ("columns", k, k_len)):
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < stop):
            raise ValueError(f"{name} must lie in 0..{stop - 1}; got {int(ids.min())}..{int(ids.max())}.")
    col_blocks = -(-k_len // block_k)
    key, entry = torch.unique((q // block_q) * col_blocks + k // block_k, return_inverse=True)
    row_words = bitmask.words_per_row(block_k)
    word = (entry * block_q + q % block_q) * row_words + k % block_k // bitmask.WORD
    bit = torch.ones_like(k, dtype=torch.int32) << (k % block_k % bitmask.WORD).to(torch.int32)
    words = torch.zeros(len(key) * block_q * row_words, dtype=torch.int32, device=q.device)
    words.index_add_(0, word, bit)
    tile = torch.arange(1, len(key) + 1, device=q.device)
    return key // col_blocks, key % col_blocks, tile, words.view(-1, block_q, row_words)


def part_of_blocks(rows: Tensor, cols: Tensor, live: Tensor) -> Part:
    """The tiles with these scores: bool `[E, block_q, block_k]`."""
    tile = torch.arange(1, len(rows) + 1, device=rows.device)
    return rows, cols, tile, bitmask.pack(live)


def scores_of_blocks(rows: Tensor, cols: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """The live scores of blocks of any size: bool `[E, R, C]` at block rows and columns `[E]`."""
    which, q, k = live.nonzero(as_tuple=True)
    return rows[which] * live.shape[1] + q, cols[which] * live.shape[2] + k

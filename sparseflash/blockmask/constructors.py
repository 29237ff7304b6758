"""The arguments of the constructors of `BlockMask`, checked and cut into tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflash.blockmask import bitmask
from sparseflash.blockmask.arguments import Block, block_pair, boolean, check_block_count, known_integers, token_counts
from sparseflash.blockmask.build import SCORES_AT_ONCE, Part, tile_list, tiles_of_dense
from sparseflash.blockmask.threads import one_thread

# `(q_len, k_len, block_q, block_k, parts, numbers)`: see `build.arrays_of`.
Tiles = tuple[int, int, int, int, list[Part], Tensor | None]


def of_dense(dense: Any, block: Block) -> Tiles:
    """The tiles of the live scores of a dense boolean matrix."""
    block_q, block_k = block_pair(block)
    dense = boolean(dense, "dense")
    if dense.ndim not in (2, 3, 4):
        raise ValueError(f"dense must have shape [Nq, Nk], [Hq, Nq, Nk] or [B, Hq, Nq, Nk]; got {list(dense.shape)}.")
    q_len, k_len = token_counts(dense.shape[-2], dense.shape[-1])
    dense = dense.reshape((1,) * (4 - dense.ndim) + dense.shape)
    batch, heads = dense.shape[:2]
    if batch == 0 or heads == 0:
        raise ValueError(f"dense must have at least one batch element and head; got {list(dense.shape)}.")
    with one_thread(dense.numel() <= SCORES_AT_ONCE):
        parts = [tiles_of_dense(head, block_q, block_k) for head in dense.reshape(-1, q_len, k_len)]
    return q_len, k_len, block_q, block_k, parts, torch.arange(len(parts), device="cpu").view(batch, heads)


def of_layout(layout: Any, block: Block, q_len: int | None, k_len: int | None) -> Tiles:
    """The tiles of a boolean block layout, each of them fully live."""
    block_q, block_k = block_pair(block)
    layout = boolean(layout, "layout")
    if layout.ndim not in (2, 3, 4):
        raise ValueError(f"layout must have shape [Mq, Mk], [Hq, Mq, Mk] or [B, Hq, Mq, Mk]; got {list(layout.shape)}.")
    rows, cols = layout.shape[-2:]
    q_len, k_len = token_counts(rows * block_q if q_len is None else q_len, cols * block_k if k_len is None else k_len)
    check_block_count("layout", layout, q_len, k_len, block_q, block_k)
    layout = layout.reshape((1,) * (4 - layout.ndim) + layout.shape)
    batch, heads = layout.shape[:2]
    if batch == 0 or heads == 0:
        raise ValueError(f"layout must have at least one batch element and head; got {list(layout.shape)}.")
    no_words = torch.zeros(0, block_q, bitmask.words_per_row(block_k), dtype=torch.int32, device=layout.device)
    parts = []
    for head in layout.reshape(-1, rows, cols):
        i, j = head.nonzero(as_tuple=True)
        parts.append((i, j, torch.zeros_like(i), no_words))
    return q_len, k_len, block_q, block_k, parts, torch.arange(len(parts), device="cpu").view(batch, heads)


def of_tiles(rows: Any, cols: Any, q_len: int, k_len: int | None, block: Block, tile: Any, live: Any) -> Tiles:
    """The tiles of a list, with the live scores of each."""
    block_q, block_k = block_pair(block)
    q_len, k_len = token_counts(q_len, q_len if k_len is None else k_len)
    rows, cols = tile_list(rows, cols, -(-q_len // block_q), -(-k_len // block_k))
    if live is None:
        live = torch.zeros(0, block_q, block_k, dtype=torch.bool, device=rows.device)
        tile = torch.zeros_like(rows) if tile is None else tile
    live = boolean(live, "live")
    if live.ndim != 3 or live.shape[1:] != (block_q, block_k):
        raise ValueError(f"live must have shape [T, {block_q}, {block_k}]; got {list(live.shape)}.")
    if tile is None:
        if len(live) != len(rows):
            raise ValueError(
                f"live must have one entry per tile, {len(rows)}, unless tile is given to assign them; got {len(live)}."
            )
        tile = torch.arange(1, len(rows) + 1, device=rows.device)
    tile = known_integers(tile, "tile", rows.device)
    if rows.shape != tile.shape:
        raise ValueError(f"rows and tile must have one shape [E]; got {list(rows.shape)} and {list(tile.shape)}.")
    if tile.numel() and not (int(tile.min()) >= 0 and int(tile.max()) <= len(live)):
        raise ValueError(f"tile must lie in 0..{len(live)}; got {int(tile.min())}..{int(tile.max())}.")
    return q_len, k_len, block_q, block_k, [(rows, cols, tile, bitmask.pack(live))], None

"""The same live scores in tiles of another size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import Block, block_pair
from sparseflash.blockmask.csr import take_rows
from sparseflash.blockmask.ops.tilelist import TileList, compose, in_chunks, mask_of, tiles_of


def reblock(mask: BlockMask, block: Block) -> BlockMask:
    """See `BlockMask.reblock`."""
    block_q, block_k = block_pair(block)
    if (block_q, block_k) == (mask.block_q, mask.block_k):
        return mask
    made = tiles_of(mask)
    made = _split(made, min(block_q, mask.block_q), min(block_k, mask.block_k))
    made = _join_keys(made, block_k)
    made = _join_queries(made, block_q)
    return mask_of(made, mask.lengths)


def to_one_block(masks: Sequence[BlockMask]) -> list[BlockMask]:
    """All masks in the finest of their block sizes, in each dimension."""
    block = min(mask.block_q for mask in masks), min(mask.block_k for mask in masks)
    return [reblock(mask, block) for mask in masks]


def _split(made: TileList, block_q: int, block_k: int) -> TileList:
    down, across = made.block_q // block_q, made.block_k // block_k
    if down * across == 1:
        return made
    row_blocks = made.blocks[0]
    pieces = _cut(made.words, made.block_k, block_q, block_k)  # [T * down * across, block_q, W]
    live = (pieces != 0).any(-1).any(-1).view(-1, down * across)
    live = torch.cat([live.new_ones(1, down * across), live])
    kind_of_piece, piece = live.nonzero(as_tuple=True)
    starts = torch.searchsorted(kind_of_piece, torch.arange(len(live) + 1, device=live.device))
    source, which = take_rows(starts, made.kind)
    kind, piece = kind_of_piece[which], piece[which]
    new_rows = -(-made.q_len // block_q)
    pattern, i = made.row[source] // row_blocks, made.row[source] % row_blocks
    return replace(
        made,
        block_q=block_q,
        block_k=block_k,
        row=pattern * new_rows + i * down + piece // across,
        col=made.col[source] * across + piece % across,
        kind=torch.where(kind > 0, (kind - 1) * (down * across) + piece + 1, 0),
        words=pieces,
    )


def _cut(words: Tensor, old_block_k: int, block_q: int, block_k: int) -> Tensor:
    """The pieces of each tile in row-major order: int32 `[T * pieces, block_q, W]`."""
    if old_block_k > block_k and block_k < bitmask.WORD:
        words = torch.stack([words & 0xFFFF, (words >> 16) & 0xFFFF], dim=-1).flatten(-2)
    count, old_block_q, width = words.shape
    each = bitmask.words_per_row(block_k)
    pieces = words.view(count, old_block_q // block_q, block_q, width // each, each).transpose(2, 3)
    return pieces.reshape(-1, block_q, each)


def _join_keys(made: TileList, block_k: int) -> TileList:
    parts = block_k // made.block_k
    if parts == 1:
        return made
    known = bitmask.choices(made.words, made.block_k)
    row, col, which, recipes = compose(
        made.row, made.col // parts, made.kind, made.col % parts, parts,
        col_blocks=-(-made.k_len // block_k), dead=len(known) - 1,
    )  # fmt: skip
    words = in_chunks(
        lambda some: bitmask.side_by_side(known[some], made.block_k), recipes, known[0].numel() * parts
    )  # fmt: skip
    return replace(made, block_k=block_k, row=row, col=col, kind=which + 1, words=words)


def _join_queries(made: TileList, block_q: int) -> TileList:
    parts = block_q // made.block_q
    if parts == 1:
        return made
    (row_blocks, col_blocks), new_rows = made.blocks, -(-made.q_len // block_q)
    known = bitmask.choices(made.words, made.block_k)
    pattern, i = made.row // row_blocks, made.row % row_blocks
    row, col, which, recipes = compose(
        pattern * new_rows + i // parts, made.col, made.kind, i % parts, parts,
        col_blocks=col_blocks, dead=len(known) - 1,
    )  # fmt: skip
    words = in_chunks(lambda some: known[some].flatten(1, 2), recipes, known[0].numel() * parts)
    return replace(made, block_q=block_q, row=row, col=col, kind=which + 1, words=words)

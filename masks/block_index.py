"""Blocks that something else has chosen, as lists of block numbers: what `BlockMask.from_block_index` makes of them."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, block_pair, flag, token_counts
from sparseflash.masks import fused
from sparseflash.masks.tiling.arguments import at_least
from sparseflash.masks.tiling.chosen import Frame, as_heads, dynamic_mask, frame


@torch.no_grad()
def mask_of_index(
    index: Tensor, counts: Tensor | None, block: Block, q_len: int, k_len: int, causal: bool, group: int
) -> BlockMask:
    """See `BlockMask.from_block_index`."""
    block_q, block_k = block_pair(block)
    q_len, k_len = token_counts(q_len, k_len)
    index = as_heads("index", index, "Mq, K", floating=False)
    group = at_least(1, group, "group", "query heads")
    if index.shape[2] != -(-q_len // block_q):
        raise ValueError(
            f"index must have {-(-q_len // block_q)} rows, one for each block of {block_q} of {q_len} queries; got "
            f"{index.shape[2]}."
        )
    if counts is not None:
        counts = _checked_counts(counts, index)
    of = frame(q_len, k_len, (block_q, block_k), flag(causal, "causal"), 0, 0, index.device)
    batch, heads, rows, choices = index.shape
    room = batch * heads * of.rooms[min(choices, of.open.shape[1])]
    if choices <= fused.LONGEST_LIST and fused.serves(index, rows, of.open.shape[1], longest=None):
        from sparseflash.masks.fused.index import tiles_of_index  # imports Triton

        return dynamic_mask(of, *tiles_of_index(index, counts, of, room), of.bits, (batch, heads), group)
    return dynamic_mask(of, *_tiles(index, counts, of, room), of.bits, (batch, heads), group)


def _checked_counts(counts: Tensor, index: Tensor) -> Tensor:
    """The counts as `[B, H, Mq]`."""
    if not isinstance(counts, Tensor) or counts.is_floating_point() or counts.is_complex():
        got = counts.dtype if isinstance(counts, Tensor) else type(counts).__name__
        raise TypeError(f"counts must be an integer tensor; got {got}.")
    shape = tuple(index.shape[:3])
    if counts.ndim > 3 or (1,) * (3 - counts.ndim) + tuple(counts.shape) != shape:
        raise ValueError(f"counts must have one number for each row of index, {list(shape)}; got {list(counts.shape)}.")
    if counts.device != index.device:
        raise ValueError(f"counts must be on index's device {index.device}; got {counts.device}.")
    return counts.detach().reshape(shape)


def _tiles(index: Tensor, counts: Tensor | None, of: Frame, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """The arrays `(indptr, indices, tile)` of the mask, with room for `room` tiles.

    Takes time and memory in proportion to the lists, not to all the tiles that there are.
    """
    (rows, cols), choices, device = of.open.shape, index.shape[3], index.device
    col = index.to(torch.int64)  # a narrow type may be too small for the bounds
    none = (col < 0) | (col >= cols)
    if counts is not None:
        none |= torch.arange(choices, device=device) >= counts.unsqueeze(-1)
    col = col.masked_fill(none, cols).sort(-1).values
    again = torch.nn.functional.pad(col[..., 1:] == col[..., :-1], (1, 0))
    place = torch.arange(rows, device=device)[:, None] * cols + col.clamp(max=cols - 1)
    kept = ~again & (col < cols) & of.open.view(-1)[place]
    running = kept.view(-1).cumsum(0)
    indptr = torch.nn.functional.pad(running.view(-1, choices)[:, -1], (1, 0)).to(torch.int32)
    # What is not kept goes to one entry past the room.
    at = torch.where(kept.view(-1), running - 1, room)

    def listed(values: Tensor) -> Tensor:
        empty = torch.zeros(room + 1, dtype=torch.int32, device=device)
        return empty.scatter_(0, at, values.reshape(-1).to(torch.int32))[:room]

    return indptr, listed(col), listed(of.kind[place])

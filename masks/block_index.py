"""Masks of given lists of block numbers, one list for each block of queries or for each query."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import Block, block_pair, checked_integers, flag, token_counts
from sparseflash.blockmask.cache import bounded_tensors
from sparseflash.limits import check_count
from sparseflash.masks import fused
from sparseflash.masks.tiling.arguments import head_count
from sparseflash.masks.tiling.chosen import RowFrame, as_heads, dynamic_mask, pattern_of, row_frame


@torch.no_grad()
def mask_of_index(
    index: Tensor, counts: Tensor | None, block: Block, q_len: int, k_len: int, causal: bool, group: int
) -> BlockMask:
    """See `BlockMask.from_block_index`."""
    block_q, block_k = block_pair(block)
    q_len, k_len = token_counts(q_len, k_len)
    index = as_heads("index", index, "Mq, K", floating=False)
    group = head_count(group, "group", "query heads")
    if index.shape[2] != -(-q_len // block_q):
        raise ValueError(
            f"index must have {-(-q_len // block_q)} rows, one for each block of {block_q} of {q_len} queries; got "
            f"{index.shape[2]}."
        )
    if counts is not None:
        counts = _checked_counts(counts, index)
    of = row_frame(q_len, k_len, (block_q, block_k), flag(causal, "causal"), index.device)
    batch, heads, rows, choices = index.shape
    room = batch * heads * of.rooms[min(choices, -(-k_len // block_k))]
    if fused.serves(index, rows, choices, longest=fused.LONGEST_LIST):
        from sparseflash.masks.fused.index import tiles_of_index  # imports Triton

        return dynamic_mask(of, *tiles_of_index(index, counts, of, room), of.bits, (batch, heads), group)
    return dynamic_mask(of, *_tiles(index, counts, of, room), of.bits, (batch, heads), group)


def _checked_counts(counts: Tensor, index: Tensor) -> Tensor:
    checked_integers(counts, "counts")
    shape = tuple(index.shape[:3])
    if counts.ndim > 3 or (1,) * (3 - counts.ndim) + tuple(counts.shape) != shape:
        raise ValueError(f"counts must have one number for each row of index, {list(shape)}; got {list(counts.shape)}.")
    if counts.device != index.device:
        raise ValueError(f"counts must be on index's device {index.device}; got {counts.device}.")
    return counts.detach().reshape(shape)


@torch.no_grad()
def mask_of_queries(
    index: Tensor, rows: int, block_k: int, k_len: int, causal: bool, stop: Tensor | None = None
) -> BlockMask:
    """The mask of lists `[B, H, Nq, K]`, one for each query, in which a query is a block of `rows` rows.

    So a block row has the heads of a group for one query, which share the list: see `sparseflash.grouped`. Row r
    belongs to query `r // rows`; if causal, it sees no key after its own, and the last query is at the last key. With
    `stop`, int64 `[Nq]`, query p sees keys before `stop[p]` only, whatever `causal` says.
    """
    (batch, heads, q_len, choices), device = index.shape, index.device
    cols = -(-k_len // block_k)
    col, first = _sorted_once(index, None, cols)
    kind = torch.zeros_like(col)
    if causal and stop is None:
        stop = torch.arange(k_len - q_len, k_len, device=device) + 1
    if stop is not None:
        live = stop[:, None] - col * block_k
        first &= live > 0
        kind = torch.where(live < block_k, live, 0)
    elif k_len % block_k:
        kind = torch.where(col == cols - 1, k_len % block_k, 0)
    room = batch * heads * q_len * min(choices, cols)
    words = _first_keys(block_k, rows, device)
    if torch.compiler.is_compiling():  # Dynamo cannot guard the sizes of a kept tensor on q's
        pattern = torch.arange(batch * heads, dtype=torch.int32, device=device).view(batch, heads)
    else:
        pattern = pattern_of(batch, heads, 1, device)
    return BlockMask(
        q_len * rows, k_len, rows, block_k, *_compacted(first, col, kind, room), words.detach(), pattern.detach(),
        dynamic=True,
    )  # fmt: skip


@bounded_tensors(maxsize=32)
def _first_keys(block_k: int, rows: int, device: torch.device) -> Tensor:
    """The words of tiles with the first 1, 2, ... keys live: int32 `[block_k - 1, rows, words]`."""
    words = torch.from_numpy(bitmask.below(np.arange(1, block_k), block_k))
    return words.unsqueeze(1).expand(-1, rows, -1).contiguous().to(device, non_blocking=True)


_first_keys._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _tiles(index: Tensor, counts: Tensor | None, of: RowFrame, room: int) -> tuple[Tensor, Tensor, Tensor]:
    col, first = _sorted_once(index, counts, -(-of.k_len // of.block[1]))
    at = (col - of.last_whole).clamp(0, of.kinds.shape[1] - 1)
    kind = of.kinds.expand(*col.shape[:2], -1, -1).gather(3, at)
    return _compacted(first & (col < of.stop), col, kind, room)


def _sorted_once(index: Tensor, counts: Tensor | None, cols: int) -> tuple[Tensor, Tensor]:
    """The lists in ascending order, int64, and where a block occurs in them for the first time."""
    col = index.to(torch.int64)  # a narrow type may be too small for the bounds
    none = (col < 0) | (col >= cols)
    if counts is not None:
        none |= torch.arange(index.shape[3], device=index.device) >= counts.unsqueeze(-1)
    col = col.masked_fill(none, cols).sort(-1).values
    again = torch.nn.functional.pad(col[..., 1:] == col[..., :-1], (1, 0))
    return col, ~again & (col < cols)


def _compacted(kept: Tensor, col: Tensor, kind: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """`(indptr, indices, tile)` of the entries of lists `[B, H, rows, K]` that are kept."""
    choices, device = kept.shape[3], kept.device
    check_count("the room for tiles of a mask", room, remedy="Use larger blocks, or choose fewer of them.")
    running = kept.reshape(-1).cumsum(0)
    indptr = torch.nn.functional.pad(running.view(-1, choices)[:, -1], (1, 0)).to(torch.int32)
    # Entries that are not kept go to one place past the room.
    at = torch.where(kept.reshape(-1), running - 1, room)

    def listed(values: Tensor) -> Tensor:
        empty = torch.zeros(room + 1, dtype=torch.int32, device=device)
        return empty.scatter_(0, at, values.reshape(-1).to(torch.int32))[:room]

    return indptr, listed(col), listed(kind)

"""FlashInfer's block-sparse rows: the arguments of `BlockSparseAttentionWrapper.plan`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, boolean, checked_integers, integer, plain_tensor, token_counts
from sparseflash.blockmask.build import tile_list
from sparseflash.blockmask.csr import row_of_entry
from sparseflash.interop.heads import chosen_block, one_head, whole_blocks
from sparseflash.interop.scores import blocks_of, part_of_blocks, part_of_scores, scores_of_blocks


class FlashInferBSR(NamedTuple):
    """The mask arguments of `BlockSparseAttentionWrapper.plan`, with its names: `wrapper.plan(**bsr._asdict(), ...)`.

    >>> to_flashinfer(BlockMask.dense(32, block=16)).indptr.tolist()
    [0, 2, 4]
    """

    indptr: Tensor  # int32 [M / R + 1]
    indices: Tensor  # int32 [nnz]: block columns
    M: int  # queries
    N: int  # keys
    R: int  # queries per block
    C: int  # keys per block
    mask: Tensor | None  # bool [nnz, R, C]; None: every listed block is full


def to_flashinfer(mask: BlockMask, *, batch: int | None = None, head: int | None = None) -> FlashInferBSR:
    """The arguments of FlashInfer's `BlockSparseAttentionWrapper.plan` for one pattern, on the mask's device.

    >>> to_flashinfer(BlockMask.from_layout(torch.eye(2, dtype=torch.bool), block=16))
    FlashInferBSR(indptr=tensor([0, 1, 2], dtype=torch.int32), indices=tensor([0, 1], dtype=torch.int32), \
    M=32, N=32, R=16, C=16, mask=None)

    Args:
        batch, head: select the pattern if there are several, because a plan has one mask for all heads.

    The `mask` of the result is None if every tile is full; otherwise it takes `block_q * block_k` bytes per tile.

    Raises ValueError if there are several patterns to select from, or if the blocks do not divide the lengths.
    """
    part = one_head(mask, batch, head, "a FlashInfer plan")
    whole_blocks(mask, "a FlashInfer plan", "Pad queries and keys to whole blocks.")
    rows, cols, tile, _ = part
    live = None
    if bool((tile > 0).any()):
        live = blocks_of(part, torch.arange(len(rows), device=rows.device), mask.block_q, mask.block_k)
    indptr = torch.searchsorted(rows, torch.arange(mask.blocks[0] + 1, device=rows.device))
    return FlashInferBSR(
        indptr.to(torch.int32), cols.to(torch.int32), mask.q_len, mask.k_len, mask.block_q, mask.block_k, live
    )


def from_flashinfer(
    indptr: Tensor, indices: Tensor, M: int, N: int, R: int, C: int, mask: Tensor | None = None, *,
    block: Block | None = None,
) -> BlockMask:  # fmt: skip
    """The mask of the arguments of FlashInfer's `BlockSparseAttentionWrapper.plan`: `from_flashinfer(*bsr)`.

    >>> from_flashinfer(torch.tensor([0, 1, 3]), torch.tensor([2, 0, 1]), 64, 96, 32, 32)
    BlockMask(64 x 96, blocks of 32, 3 tiles: 3 full + 0 partial, density 50 %)

    Args:
        indptr: int `[M / R + 1]`.
        indices: int `[nnz]`, block columns in any order, each at most once per row.
        M, N, R, C: M queries and N keys in blocks of R x C.
        mask: bool `[nnz, R, C]` (True: live; None: all).
        block: tokens, by default `(R, C)` if a mask can have such blocks, else 128.

    Raises ValueError for blocks that do not divide the lengths, an index out of range, a block listed twice, or a
    `mask` of another shape.
    """
    q_len, k_len = token_counts(M, N)
    size_q, size_k = integer(R, "R", "tokens"), integer(C, "C", "tokens")
    if size_q < 1 or size_k < 1 or q_len % size_q or k_len % size_k:
        raise ValueError(f"R x C must divide M x N; got {size_q} x {size_k} and {q_len} x {k_len}.")
    row_blocks, col_blocks = q_len // size_q, k_len // size_k
    for name, x in (("indptr", indptr), ("indices", indices)):
        checked_integers(plain_tensor(x, name), name)
    if indptr.shape != (row_blocks + 1,) or int(indptr[0]) != 0 or bool((indptr.diff() < 0).any()):
        raise ValueError(
            f"indptr must have {row_blocks + 1} entries, start at 0 and not decrease; got "
            f"{indptr.flatten()[:8].tolist()} of shape {list(indptr.shape)}."
        )
    if indices.shape != (int(indptr[-1]),):
        raise ValueError(f"indices must have the {int(indptr[-1])} entries of indptr; got {list(indices.shape)}.")
    rows, cols = tile_list(row_of_entry(indptr, len(indices)), indices, row_blocks, col_blocks)
    if len((rows * col_blocks + cols).unique()) < len(rows):
        raise ValueError("indices must list a block at most once per row.")
    live = torch.ones(1, 1, 1, dtype=torch.bool, device=cols.device) if mask is None else boolean(mask, "mask")
    if mask is not None and live.shape != (len(cols), size_q, size_k):
        raise ValueError(f"mask must have shape [{len(cols)}, {size_q}, {size_k}]; got {list(live.shape)}.")
    block_q, block_k = chosen_block(block, (size_q, size_k))
    if (block_q, block_k) != (size_q, size_k):
        live = live.expand(len(cols), size_q, size_k)
        part = part_of_scores(*scores_of_blocks(rows, cols, live), q_len, k_len, block_q, block_k)
    elif mask is None:
        part = rows, cols, torch.zeros_like(rows), part_of_blocks(rows[:0], cols[:0], live.expand(0, size_q, size_k))[3]
    else:
        part = part_of_blocks(rows, cols, live)
    return BlockMask._of(q_len, k_len, block_q, block_k, [part])

"""PyTorch's sparse tensors: one boolean matrix per pattern, in CSR or BSR format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, token_counts
from sparseflash.blockmask.build import Part, tile_list
from sparseflash.blockmask.csr import row_of_entry
from sparseflash.interop.heads import chosen_block, one_head, whole_blocks
from sparseflash.interop.scores import blocks_of, part_of_blocks, part_of_scores, scores_of, scores_of_blocks


def to_torch_sparse(
    mask: BlockMask, *, layout: torch.layout = torch.sparse_csr, batch: int | None = None, head: int | None = None
) -> Tensor:
    """A boolean sparse tensor `[q_len, k_len]` with the live scores of one pattern, on the mask's device.

    >>> to_torch_sparse(BlockMask.dense(2, 3, block=16)).to_dense().tolist()
    [[True, True, True], [True, True, True]]

    Args:
        layout: `torch.sparse_csr`, one entry per live score; or `torch.sparse_bsr`, whose dense blocks are the mask's
            tiles (`block_q * block_k` bytes each) and must divide the lengths.
        batch, head: select the pattern if there are several.

    To convert all heads and back, pass `[to_torch_sparse(mask, head=h) for h in range(H)]` to `from_torch_sparse`.

    Raises ValueError if there are several patterns to select from, and for BSR with ragged ends.
    """
    if layout not in (torch.sparse_csr, torch.sparse_bsr):
        raise ValueError(f"layout must be torch.sparse_csr or torch.sparse_bsr; got {layout}.")
    part = one_head(mask, batch, head, "a sparse tensor")
    rows, cols = part[:2]
    size = (mask.q_len, mask.k_len)
    if layout == torch.sparse_bsr:
        whole_blocks(mask, "a BSR tensor", "Use layout=torch.sparse_csr.")
        entries = torch.arange(len(rows), device=mask.device)
        live = blocks_of(part, entries, mask.block_q, mask.block_k)
        starts = torch.searchsorted(rows, torch.arange(mask.blocks[0] + 1, device=mask.device))
        # PyTorch 2.11 demands a stride of 1 even where no tile is listed.
        cols = cols.clone(memory_format=torch.contiguous_format)
        return torch.sparse_bsr_tensor(starts, cols, live, size=size, device=mask.device, check_invariants=True)
    q, k = scores_of(part, mask.block_q, mask.block_k)
    key = torch.sort(q * mask.k_len + k).values
    starts = torch.searchsorted(key, torch.arange(mask.q_len + 1, device=mask.device) * mask.k_len)
    every = torch.ones_like(key, dtype=torch.bool)
    return torch.sparse_csr_tensor(
        starts, key % mask.k_len, every, size=size, device=mask.device, check_invariants=True
    )


def from_torch_sparse(matrix: Tensor | Sequence[Tensor], *, block: Block | None = None) -> BlockMask:
    """The mask of a boolean sparse tensor `[q_len, k_len]` (CSR, BSR or COO), or of a list of them, one per head.

    >>> from_torch_sparse(torch.eye(100, dtype=torch.bool).to_sparse(), block=32)
    BlockMask(100 x 100, blocks of 32, 4 tiles: 0 full + 4 partial (2 distinct), density 1 %)

    Args:
        matrix: boolean; True entries are live, and stored False entries are allowed.
        block: tokens, by default the blocks of a BSR tensor if a mask can have them, else 128.

    Time and memory are proportional to the stored entries.

    Raises TypeError for another layout or for values that are not boolean, ValueError for an empty list or tensors of
    different shapes.
    """
    matrices = list(matrix) if isinstance(matrix, Sequence) else [matrix]
    if not matrices:
        raise ValueError("matrix must be a sparse tensor or a list of at least one; got an empty list.")
    for one in matrices:
        if not isinstance(one, Tensor):
            raise TypeError(f"matrix must be a sparse tensor; got {type(one).__name__}.")
        if one.layout not in (torch.sparse_csr, torch.sparse_bsr, torch.sparse_coo):
            raise TypeError(f"matrix must have the layout sparse_csr, sparse_bsr or sparse_coo; got {one.layout}.")
        if one.dtype != torch.bool:
            raise TypeError(f"matrix must be boolean (True: live); got {one.dtype}.")
        if one.shape != matrices[0].shape or one.ndim != 2 or one.dense_dim():
            raise ValueError(
                f"all matrices must have one shape [Nq, Nk]; got {list(one.shape)} and {list(matrices[0].shape)}."
            )
    q_len, k_len = token_counts(*matrices[0].shape)
    own = matrices[0].values().shape[1:] if matrices[0].layout == torch.sparse_bsr else None
    block_q, block_k = chosen_block(block, own)
    parts = [_part(one, q_len, k_len, block_q, block_k) for one in matrices]
    return BlockMask._of(q_len, k_len, block_q, block_k, parts)


def _part(matrix: Tensor, q_len: int, k_len: int, block_q: int, block_k: int) -> Part:
    if matrix.layout == torch.sparse_coo:
        matrix = matrix.coalesce()
        q, k = matrix.indices()[:, matrix.values()]
        return part_of_scores(q, k, q_len, k_len, block_q, block_k)
    values, cols = matrix.values(), matrix.col_indices().long()
    starts = matrix.crow_indices()
    if int(starts[0]) != 0 or int(starts[-1]) != len(cols) or bool((starts.diff() < 0).any()):
        raise ValueError(f"crow_indices must run from 0 to {len(cols)} and not decrease; got {starts.tolist()[:8]}.")
    rows = row_of_entry(starts, len(cols))
    if matrix.layout == torch.sparse_csr:
        return part_of_scores(rows[values], cols[values], q_len, k_len, block_q, block_k)
    if values.shape[1:] == (block_q, block_k):
        rows, cols = tile_list(rows, cols, q_len // block_q, k_len // block_k)
        return part_of_blocks(rows, cols, values)
    return part_of_scores(*scores_of_blocks(rows, cols, values), q_len, k_len, block_q, block_k)

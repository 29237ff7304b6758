"""SciPy's sparse matrices: one boolean matrix per pattern, in CSR or BSR format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, token_counts
from sparseflash.blockmask.build import Part, tile_list
from sparseflash.blockmask.csr import row_of_entry
from sparseflash.interop.heads import chosen_block, one_head, whole_blocks
from sparseflash.interop.scores import blocks_of, part_of_blocks, part_of_scores, scores_of


def to_scipy(mask: BlockMask, *, format: str = "csr", batch: int | None = None, head: int | None = None) -> Any:
    """A boolean `scipy.sparse` array `[q_len, k_len]` with the live scores of one pattern, in canonical format.

    >>> to_scipy(BlockMask.from_function(lambda q, k: k <= q, 4, block=16)).toarray().astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]

    Args:
        format: "csr", one entry per live score; or "bsr", whose dense blocks are the mask's tiles (`block_q * block_k`
            bytes each) and must divide the lengths.
        batch, head: select the pattern if there are several.

    To convert all heads and back, pass `[to_scipy(mask, head=h) for h in range(H)]` to `from_scipy`.

    Raises ValueError if there are several patterns to select from, and for "bsr" with ragged ends.
    """
    from scipy import sparse

    if format not in ("csr", "bsr"):
        raise ValueError(f'format must be "csr" or "bsr"; got {format!r}.')
    part = tuple(array.cpu() for array in one_head(mask, batch, head, "a matrix"))
    shape = (mask.q_len, mask.k_len)
    rows, cols, tile, words = part
    if format == "bsr":
        whole_blocks(mask, "a BSR matrix", 'Use format="csr".')
        live = blocks_of((rows, cols, tile, words), torch.arange(len(rows), device="cpu"), mask.block_q, mask.block_k)
        starts = torch.searchsorted(rows, torch.arange(mask.blocks[0] + 1, device="cpu"))
        index = np.int32 if len(rows) < 2**31 else np.int64
        arrays = live.numpy(), cols.numpy().astype(index), starts.numpy().astype(index)
        return sparse.bsr_array(arrays, shape=shape, blocksize=(mask.block_q, mask.block_k))
    q, k = scores_of((rows, cols, tile, words), mask.block_q, mask.block_k)
    entries = np.ones(len(q), dtype=bool), (q.numpy(), k.numpy())
    return sparse.coo_array(entries, shape=shape).tocsr()


def from_scipy(matrix: Any, *, block: Block | None = None) -> BlockMask:
    """The mask of a boolean `scipy.sparse` matrix or array of any format, or of a list of them, one per head.

    >>> from scipy.sparse import eye_array
    >>> from_scipy(eye_array(100, dtype=bool), block=32)
    BlockMask(100 x 100, blocks of 32, 4 tiles: 0 full + 4 partial (2 distinct), density 1 %)

    Args:
        matrix: boolean; True entries are live, and stored False entries and duplicates are allowed.
        block: tokens, by default the blocks of a BSR matrix if a mask can have them, else 128.

    Time and memory are proportional to the stored entries.

    Raises TypeError if the input is not sparse or not boolean (use `matrix != 0`, say), ValueError for an empty list or
    matrices of different shapes.
    """
    from scipy import sparse

    matrices = list(matrix) if isinstance(matrix, Sequence) else [matrix]
    if not matrices:
        raise ValueError("matrix must be a sparse matrix or a list of at least one; got an empty list.")
    for one in matrices:
        if not sparse.issparse(one):
            raise TypeError(f"matrix must be a scipy.sparse matrix; got {type(one).__name__}.")
        if one.dtype != np.bool_:
            raise TypeError(f"matrix must be boolean (True: live); got {one.dtype}. Choose what is live: matrix != 0.")
        if one.shape != matrices[0].shape or len(one.shape) != 2:
            raise ValueError(f"all matrices must have one shape [Nq, Nk]; got {one.shape} and {matrices[0].shape}.")
    q_len, k_len = token_counts(*matrices[0].shape)
    block_q, block_k = chosen_block(block, matrices[0].blocksize if matrices[0].format == "bsr" else None)
    parts = [_part(one, q_len, k_len, block_q, block_k) for one in matrices]
    return BlockMask._of(q_len, k_len, block_q, block_k, parts)


def _part(matrix: Any, q_len: int, k_len: int, block_q: int, block_k: int) -> Part:
    if matrix.format == "bsr" and tuple(matrix.blocksize) == (block_q, block_k):
        matrix = matrix.copy()
        matrix.sum_duplicates()  # in place
        rows = row_of_entry(_tensor(matrix.indptr), len(matrix.indices))
        rows, cols = tile_list(rows, _tensor(matrix.indices), q_len // block_q, k_len // block_k)
        return part_of_blocks(rows, cols, torch.from_numpy(matrix.data))
    entries = matrix.tocoo(copy=True)
    entries.sum_duplicates()
    q, k = (_tensor(index[entries.data]) for index in (entries.row, entries.col))
    return part_of_scores(q, k, q_len, k_len, block_q, block_k)


def _tensor(indices: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(indices.astype(np.int64))

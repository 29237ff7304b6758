"""SciPy's sparse matrices: one boolean matrix per pattern, in CSR or BSR format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, checked_mask
from sparseflash.interop.torch_sparse import from_torch_sparse, to_torch_sparse


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
    layout, make = (torch.sparse_csr, sparse.csr_array) if format == "csr" else (torch.sparse_bsr, sparse.bsr_array)
    found = to_torch_sparse(checked_mask(mask).to("cpu"), layout=layout, batch=batch, head=head)
    arrays = found.values().numpy(), found.col_indices().numpy(), found.crow_indices().numpy()
    return make(arrays, shape=tuple(found.shape))


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
    for one in matrices:
        if not sparse.issparse(one):
            raise TypeError(f"matrix must be a scipy.sparse matrix; got {type(one).__name__}.")
        if one.dtype != np.bool_:
            raise TypeError(f"matrix must be boolean (True: live); got {one.dtype}. Choose what is live: matrix != 0.")
        if len(one.shape) != 2:
            raise ValueError(f"matrix must have shape [Nq, Nk]; got {list(one.shape)}.")
    return from_torch_sparse([_tensor(one) for one in matrices], block=block)


def _tensor(matrix: Any) -> Tensor:
    if matrix.format == "bsr":
        matrix = matrix.copy()
        matrix.sum_duplicates()  # in place
        arrays = (torch.from_numpy(x) for x in (matrix.indptr, matrix.indices, matrix.data))
        return torch.sparse_bsr_tensor(*arrays, size=matrix.shape, device="cpu")
    entries = matrix.tocoo()
    places = torch.from_numpy(np.stack([entries.row, entries.col]).astype(np.int64))
    return torch.sparse_coo_tensor(places, torch.from_numpy(entries.data), matrix.shape, device="cpu")

"""The base class of the forward's and the backward's layout: prepares q, k, v and dout in the form that kernels read.

In full fp32 either whole tensors are split into pieces first, or each tile is split where it is multiplied; see
`fp32_split.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_lse, empty_out
from sparseflash.backends.triton.alignment import is_readable, readable, with_aligned_rows
from sparseflash.backends.triton.changes.kind import Request
from sparseflash.backends.triton.changes.kinds import Changed
from sparseflash.backends.triton.device_functions.fp32_split import PIECE_COUNT, PIECES_DTYPE, in_pieces
from sparseflash.backends.triton.family import Setting
from sparseflash.backends.triton.launch.launches import like
from sparseflash.backends.triton.portable.choice import wants_pieces
from sparseflash.backends.triton.portable.fitting import padded_dims
from sparseflash.backends.triton.portable.launches import Numbers
from sparseflash.blockmask.cache import BoundedDict
from sparseflash.scores.change import Scores

layouts = BoundedDict(256)  # by "forward" or "backward" and everything else that a layout depends on


class Layout:
    """Everything that depends on the layout of q, k and v, for the forward and the backward."""

    def __init__(
        self, setting: Setting, q: Tensor, k: Tensor, v: Tensor, scale: float, dropped: int, changes: Scores | None,
        wanted: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        (heads, q_len), (kv_heads, k_len) = q.shape[1:3], k.shape[1:3]
        self.numbers = Numbers(heads, kv_heads, q_len, k_len, (q.shape[-1], v.shape[-1]), scale, dropped)
        self.keep = q.dtype == torch.float32  # keep maxima and inverse sums of rows for the backward
        self.changed: Changed | None = None
        if changes is not None:
            block = None if setting.lengths else setting.block
            request = Request(q.shape[0], heads, q_len, k_len, q.dtype, q.device, block)
            self.changed = Changed(changes, request, wanted)
        self.sink = {} if self.changed is None else self.changed.sink
        self.pieces = wants_pieces(q, v, setting, heads // kv_heads)
        self._padded = (0, 0)  # the columns of queries and keys, and of values, in pieces
        if self.pieces:
            self._padded = padded_dims(*self.numbers.dims, setting.architecture, itemsize=2)
        self.as_they_are = False
        q = like(q)
        self.out, self.lse = empty_out(q, like(v)), empty_lse(q)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *dout: Tensor) -> list[Tensor]:
        """The tensors in the form that kernels read: with aligned rows, or in pieces `[B, H, N, 3, padded]`."""
        if not self.pieces:
            return [readable(x) for x in (q, k, v, *dout)]
        padded, padded_v = self._padded
        return [in_pieces(q, padded), in_pieces(k, padded), *(in_pieces(x, padded_v) for x in (v, *dout))]

    def examples(self, q: Tensor, k: Tensor, v: Tensor, *dout: Tensor) -> list[Tensor]:
        if not self.pieces:
            are_readable = [is_readable(x) for x in (q, k, v, *dout)]
            self.as_they_are = all(are_readable)
            found = [like(x) for x in (q, k, v, *dout)]
            return [x if is_read else with_aligned_rows(x) for x, is_read in zip(found, are_readable, strict=True)]
        widths = self._padded[0], self._padded[0], self._padded[1], self._padded[1]
        return [
            torch.empty(*x.shape[:3], PIECE_COUNT, width, dtype=PIECES_DTYPE, device="meta")
            for x, width in zip((q, k, v, *dout), widths)
        ]

"""The portable kernels' passes for masks that are used once: see `dynamic_call.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_out
from sparseflash.backends.saved import Saved
from sparseflash.backends.triton.family import Rows
from sparseflash.backends.triton.portable.launches import Bound
from sparseflash.backends.triton.schedule import fused
from sparseflash.blockmask import BlockMask

if TYPE_CHECKING:
    from sparseflash.backends.triton.portable.backward_pass import BackwardLayout
    from sparseflash.backends.triton.portable.forward_pass import ForwardLayout


class DynamicForward:
    """Computes out and lse."""

    def __init__(self, layout: ForwardLayout, kernel: Bound) -> None:
        # Only parts of the forward, which as a whole would keep the work of its mask alive.
        self._layout, self._kernel = layout, _Kernel(kernel)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor, Rows]:
        layout, kernel, heads = self._layout, self._kernel, q.shape[:2]
        lists = fused.listed(mask.indptr, mask.indices, mask.tile, kernel.tiling)
        out = torch.empty_like(q) if layout.out_is_as_q else empty_out(q, v)
        lse = torch.empty_like(layout.an_lse)
        if not layout.as_they_are:
            q, k, v = layout.operands(q, k, v)
        given = {"q": q, "k": k, "v": v, "out_ptr": out, "lse_ptr": lse}
        work = kernel.work_of(lists, mask.pattern.expand(heads), (heads[0], heads[1], 1), mask.q_len)
        kernel.start(work, lists, mask, given)
        return out, lse, Rows(lists, work, kernel.tile)


class DynamicBackward:
    """Computes the gradients of q, k and v."""

    def __init__(self, layout: BackwardLayout, queries: Bound, keys: Bound) -> None:
        self._layout, self._queries, self._keys = layout, _Kernel(queries), _Kernel(keys)

    def __call__(self, dout: Tensor, saved: Saved, mask: BlockMask, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        gradients, _, given = self._layout.given(dout, None, saved)
        columns = fused.columns_listed(mask.indptr, mask.indices, mask.tile, mask.blocks, self._keys.tiling)
        (batch, heads), kv_heads = saved.q.shape[:2], saved.k.shape[1]
        pattern, work = mask.pattern.expand(batch, heads), rows.work
        if work is None or rows.tile != self._queries.tile:
            work = self._queries.work_of(rows.lists, pattern, (batch, heads, 1), mask.q_len)
        self._queries.start(work, rows.lists, mask, given)
        groups = batch, kv_heads, heads // kv_heads
        self._keys.start(self._keys.work_of(columns, pattern, groups, mask.k_len), columns, mask, given)
        return gradients


class _Kernel:
    """A kernel that is bound to no work."""

    def __init__(self, bound: Bound) -> None:
        self._launch, self._programs, self.tile = bound.launch.launch, bound.launch.programs, bound.tile
        self.tiling = bound.choice.tiling

    def work_of(self, lists: fused.Listed, pattern: Tensor, shape: tuple[int, int, int], length: int) -> Tensor:
        """See `fused.work_in_start_order`."""
        return fused.work_in_start_order(lists, pattern, shape, length, self.tile)

    def start(self, work: Tensor, lists: fused.Listed, mask: BlockMask, given: dict[str, Any]) -> None:
        self._launch.start(self._programs, work, lists.index, lists.tile, mask.words, *self._launch.pick(given))

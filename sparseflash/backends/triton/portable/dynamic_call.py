"""Calls with dynamic masks, which are new at every step: prepared once for all masks of one layout.

A plan serves many calls with one mask. For a mask with a single call, making the plan's objects would take longer than
the kernels. So here the same kernels list the work, and nothing is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_out
from sparseflash.backends.saved import Saved
from sparseflash.backends.triton.family import BackwardPass, ForwardPass, Setting
from sparseflash.backends.triton.portable.backward_pass import Backward
from sparseflash.backends.triton.portable.forward_pass import Forward
from sparseflash.backends.triton.portable.launches import Bound
from sparseflash.backends.triton.schedule import fused
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.cache import BoundedDict, mask_cache

_DONE = "attended without a plan"
_MOST_LAYOUTS = 8  # of the backward's inputs, per call


class Rows(NamedTuple):
    """The lists over rows, and the work in tiles of `tile` queries."""

    lists: fused.Listed
    work: Tensor
    tile: int


class DynamicCall:
    """The forward for the first call with a mask, in half precision, and backwards that follow it."""

    def __init__(self, forward: Forward, setting: Setting, kernels: str) -> None:
        self.scale, self.kernels = forward.layout.numbers.scale, kernels
        # Parts of the forward: the forward itself would keep the work of one mask alive.
        self._layout, self._kernel, self._heads = forward.layout, _Kernel(forward.kernel), setting.plan.pattern.shape
        self.backwards = BoundedDict(_MOST_LAYOUTS)  # by the layouts of `(dout, q, k, v, out, lse)`

    def serves(self, mask: BlockMask) -> bool:
        """Whether this is the first call with a mask. Later calls plan it."""
        cache = mask_cache(mask.indices)
        return not (_DONE in cache or "plans" in cache)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor, Rows]:
        """`(out, lse, the work)`."""
        mask_cache(mask.indices)[_DONE] = True
        layout, kernel = self._layout, self._kernel
        lists = fused.listed(mask.indptr, mask.indices, mask.tile, kernel.tiling)
        out = torch.empty_like(q) if layout.out_is_as_q else empty_out(q, v)
        lse = torch.empty_like(layout.an_lse)
        if not layout.as_they_are:
            q, k, v = layout.operands(q, k, v)
        given = {"q": q, "k": k, "v": v, "out_ptr": out, "lse_ptr": lse}
        work = kernel.work_of(lists, mask.pattern.expand(self._heads), (self._heads[0], self._heads[1], 1), mask.q_len)
        kernel.start(work, lists, mask, given)
        return out, lse, Rows(lists, work, kernel.tile)

    def learn(self, key: Any, backward: BackwardPass, kv_heads: int, mask: BlockMask) -> None:
        """Prepares the backward of other masks, unless it needs a plan."""
        if not (isinstance(backward, Backward) and backward.kernels is not None):
            return
        if fused.can_search((len(mask.indptr) - 1) // mask.blocks[0], mask.blocks):
            self.backwards.put(key, DynamicBackward(backward, self._heads, kv_heads))


class DynamicBackward:
    """Computes the gradients of q, k and v."""

    def __init__(self, backward: Backward, heads: torch.Size, kv_heads: int) -> None:
        self._layout, self._queries, self._keys = backward.layout, _Kernel(backward.queries), _Kernel(backward.keys)
        self._heads, self._groups = heads, (heads[0], kv_heads, heads[1] // kv_heads)

    def __call__(
        self, dout: Tensor, saved: Saved, mask: BlockMask, rows: Rows
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`(dq, dk, dv)`."""
        gradients, _, given = self._layout.given(dout, None, saved)
        columns = fused.columns_listed(mask.indptr, mask.indices, mask.tile, mask.blocks, self._keys.tiling)
        pattern = mask.pattern.expand(self._heads)
        work = rows.work
        if rows.tile != self._queries.tile:
            work = self._queries.work_of(rows.lists, pattern, (self._heads[0], self._heads[1], 1), mask.q_len)
        self._queries.start(work, rows.lists, mask, given)
        self._keys.start(self._keys.work_of(columns, pattern, self._groups, mask.k_len), columns, mask, given)
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


def dynamic_call(
    forward: ForwardPass | None, setting: Setting, mask: BlockMask, kernels: str
) -> DynamicCall | None:  # fmt: skip
    """The call of other masks of this layout; None if it needs a plan."""
    if not (isinstance(forward, Forward) and forward.is_plain and setting.plan.lists.fused):
        return None
    return DynamicCall(forward, setting, kernels) if mask.words.data_ptr() % 16 == 0 else None

"""The forward with dynamic masks, which are new at every step: prepared once for all masks of one layout.

A plan serves many calls with one mask. For the only forward of a mask its objects take longer than the kernels, so here
the work is listed by the same kernels and nothing is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_out
from sparseflash.backends.triton.family import ForwardPass, Setting
from sparseflash.backends.triton.portable.forward_pass import Forward
from sparseflash.backends.triton.schedule import fused
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.cache import mask_cache

_DONE = "attended without a plan"


class DynamicForward:
    """Computes out and lse for the first call with a mask, in half precision."""

    def __init__(self, forward: Forward, setting: Setting) -> None:
        kernel, plan = forward.kernel, setting.plan
        # Not the forward itself, which holds the work of a mask.
        self._layout, self._launch, self._programs = forward.layout, kernel.launch.launch, kernel.launch.programs
        self._heads, self._tile, self._tiling = plan.pattern.shape, kernel.tile, kernel.choice.tiling

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor] | None:
        """`(out, lse)`; None for a mask that has been attended, which will be planned for this and later calls."""
        cache = mask_cache(mask.indices)
        if _DONE in cache or "plans" in cache:
            return None
        cache[_DONE] = True
        layout = self._layout
        lists = fused.listed(mask.indptr, mask.indices, mask.tile, self._tiling)
        pattern = mask.pattern.expand(self._heads)
        work = fused.work_in_start_order(lists, pattern, (*self._heads, 1), mask.q_len, self._tile)
        out = torch.empty_like(q) if layout.out_is_as_q else empty_out(q, v)
        lse = torch.empty_like(layout.an_lse)
        if not layout.as_they_are:
            q, k, v = layout.operands(q, k, v)
        given = self._launch.pick({"q": q, "k": k, "v": v, "out_ptr": out, "lse_ptr": lse})
        self._launch.start(self._programs, work, lists.index, lists.tile, mask.words, *given)
        return out, lse


def dynamic_forward(forward: ForwardPass, setting: Setting, mask: BlockMask) -> DynamicForward | None:
    """The forward of other masks of this layout; None if it needs a plan."""
    if (
        isinstance(forward, Forward)
        and forward.is_plain
        and setting.plan.lists.fused
        and mask.words.data_ptr() % 16 == 0
    ):
        return DynamicForward(forward, setting)
    return None

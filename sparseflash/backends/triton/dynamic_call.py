"""Calls with dynamic masks, which are new at every step: prepared once for all masks of one layout.

A plan serves many calls with one mask. For a mask with a single call, making the plan's objects would take longer than
the kernels. So here the kernels that list the work of a plan are started without a plan, and their lists are not kept.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparseflash.backends.saved import Saved
from sparseflash.backends.triton.family import BackwardPass, DynamicForward, ForwardPass, Rows, Setting
from sparseflash.backends.triton.schedule import fused
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.cache import BoundedDict, mask_cache

_DONE = "attended without a plan"
_MOST_LAYOUTS = 8  # of the backward's inputs, per call


class DynamicCall:
    """The forward for the first call with each mask of one layout, in half precision, and the backwards after it."""

    def __init__(self, forward: DynamicForward, scale: float, kernels: str) -> None:
        self.scale, self.kernels = scale, kernels
        self._forward = forward
        self._backwards = BoundedDict(_MOST_LAYOUTS)  # by the layouts of `(dout, q, k, v, out, lse)`

    def serves(self, mask: BlockMask) -> bool:
        """Whether this is the first call with a mask. Later calls plan it."""
        cache = mask_cache(mask.indices)
        return not (_DONE in cache or "plans" in cache)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor, Rows]:
        mask_cache(mask.indices)[_DONE] = True
        return self._forward(q, k, v, mask)

    def learn(self, key: Any, backward: BackwardPass, mask: BlockMask) -> None:
        """Prepares the backward of later masks, unless such a backward needs a plan."""
        if fused.can_search((len(mask.indptr) - 1) // mask.blocks[0], mask.blocks):
            made = backward.dynamic()
            if made is not None:
                self._backwards.put(key, made)

    def backward(
        self, key: Any, dout: Tensor, saved: Saved, mask: BlockMask, rows: Rows
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """`(dq, dk, dv)`; None for tensors of layouts that no earlier backward had."""
        made = self._backwards.get(key)
        return None if made is None else made(dout, saved, mask, rows)


def dynamic_call(
    forward: ForwardPass | None, setting: Setting, mask: BlockMask, scale: float, kernels: str
) -> DynamicCall | None:
    """The call for other masks of this layout; None if each mask needs a plan."""
    if forward is None or not setting.plan.lists.fused or mask.words.data_ptr() % 16:
        return None
    made = forward.dynamic()
    return None if made is None else DynamicCall(made, scale, kernels)

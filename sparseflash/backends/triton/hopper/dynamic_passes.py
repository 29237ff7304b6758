"""The Hopper kernels' passes for masks that are used once: see `dynamic_call.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sparseflash.backends.saved import Saved
from sparseflash.backends.triton.family import Rows
from sparseflash.backends.triton.persistent.backward_plan import BackwardPlan
from sparseflash.backends.triton.persistent.dynamic_plan import dynamic_work
from sparseflash.backends.triton.persistent.fused_plan import backward_plan
from sparseflash.backends.triton.schedule import fused
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.blockmask import BlockMask

if TYPE_CHECKING:
    from sparseflash.backends.triton.hopper.backward_pass import BackwardLayout
    from sparseflash.backends.triton.hopper.forward_pass import ForwardLayout


class DynamicForward:
    """Computes out and lse. Holds no tensor of a mask."""

    def __init__(self, layout: ForwardLayout, programs: int) -> None:
        self._layout, self._programs, self._tiling = layout, programs, Tiling(*layout.config.tile)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor, Rows]:
        launch = self._layout.launch
        lists = fused.listed(mask.indptr, mask.indices, mask.tile, self._tiling)
        work = dynamic_work(lists, mask.pattern.expand(q.shape[:2]), mask.q_len)
        out, lse, given = self._layout.given(q, k, v, None)
        launch.start(self._programs, *work, mask.words, *launch.pick(given))
        return out, lse, Rows(lists)


class DynamicBackward:
    """Computes the gradients of q, k and v."""

    def __init__(self, layout: BackwardLayout, programs: int) -> None:
        self._layout, self._programs, self._tiling = layout, programs, Tiling(*reversed(layout.tile))

    def __call__(self, dout: Tensor, saved: Saved, mask: BlockMask, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        layout, pattern = self._layout, mask.pattern.expand(saved.q.shape[:2])
        lists = fused.columns_full_first(mask.indptr, mask.indices, mask.tile, mask.words, mask.blocks, self._tiling)
        plan = backward_plan(
            lists, rows.lists.count, pattern, saved.k.shape[1], mask.q_len, mask.k_len,
            programs=self._programs, may_wait=False,
        )  # fmt: skip
        gradients, given = layout.given(dout, None, saved, None)
        layout.begin(given)
        for launch in layout.main:
            launch.start(plan.programs, *plan.walked(), *launch.pick(given))
        self._finish(plan, mask, pattern, rows, given)
        return gradients

    def _finish(
        self, plan: BackwardPlan, mask: BlockMask, pattern: Tensor, rows: Rows, given: Mapping[str, Any]
    ) -> None:
        finish = self._layout.finish
        finish.start(self._layout.pieces, plan.chain, *finish.pick(given))


class WideDynamicBackward(DynamicBackward):
    """The gradients for wide heads, or in tiles of 64: the last kernel computes dq, from the lists over rows."""

    def _finish(
        self, plan: BackwardPlan, mask: BlockMask, pattern: Tensor, rows: Rows, given: Mapping[str, Any]
    ) -> None:
        finish = self._layout.finish
        work, index, tile = dynamic_work(rows.lists, pattern, mask.q_len)
        finish.start(len(work), work, index, tile, mask.words, *finish.pick(given))

"""The forward by the portable kernels, prepared for tensors of one layout.

A `ForwardLayout` depends only on the layout and is shared by all plans; a `Forward` adds the work of one plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_kept, empty_out
from sparseflash.backends.triton.family import KernelChoice, Setting
from sparseflash.backends.triton.launch.launches import empty_like, of_call, one_number_of
from sparseflash.backends.triton.launcher import BoundLaunch
from sparseflash.backends.triton.portable.dynamic_passes import DynamicForward
from sparseflash.backends.triton.portable.launches import Bound, KernelLayout
from sparseflash.backends.triton.portable.merging import combine_rows, run_kernel
from sparseflash.backends.triton.portable.pass_layout import Layout, layouts
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.dropout import Dropout
from sparseflash.scores.change import Scores


class ForwardLayout(Layout):
    """A forward for tensors of one layout, with any plan."""

    def __init__(
        self, setting: Setting, q: Tensor, k: Tensor, v: Tensor, scale: float, dropped: int,
        changes: Scores | None = None,
    ) -> None:  # fmt: skip
        super().__init__(setting, q, k, v, scale, dropped, changes)
        as_q = empty_like(q)
        self.out_is_as_q = (as_q.shape, as_q.stride()) == (self.out.shape, self.out.stride())
        self.an_lse = one_number_of(self.lse, setting.plan.device)
        self.written = {"out_ptr": self.out, "lse_ptr": self.lse}
        if self.keep:
            self.written |= {"maximum_ptr": self.lse, "inverse_ptr": self.lse}
        q, k, v = self.examples(q, k, v)
        tiles = {"q": q, "k": k, "v": v}
        self.kernel = KernelLayout(
            "forward", setting, self.numbers, tiles, self.written, {**tiles, "out": self.out}, changed=self.changed,
            sink=self.sink,
        )  # fmt: skip


class Forward:
    """Computes out and lse, and in fp32 the maxima and inverse sums for the backward."""

    def __init__(self, layout: ForwardLayout, plan: Plan) -> None:
        self.layout = layout
        self.kernel: Bound = layout.kernel.bind(plan)
        self._combine = combine_rows(self.kernel, layout.kernel, layout.written, layout.sink)
        self.is_plain = (
            self._combine is None and not layout.kernel.lengths and not layout.kernel.dropout and layout.changed is None
        )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, dropout: Dropout | None,
        changes: Scores | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """In fp32 `kept` holds the rows' maxima and inverse sums; in half precision it is None."""
        layout, kernel = self.layout, self.kernel
        out = torch.empty_like(q) if layout.out_is_as_q else empty_out(q, v)
        lse = torch.empty_like(layout.an_lse)
        kept = empty_kept(q) if layout.keep else None
        if not layout.as_they_are:
            q, k, v = layout.operands(q, k, v)
        given: dict[str, Any] = {"q": q, "k": k, "v": v, "out_ptr": out, "lse_ptr": lse}
        if kept is not None:
            given["maximum_ptr"], given["inverse_ptr"] = kept.unbind()
        if self.is_plain:  # a fast path for the shortest calls
            kernel.work.ready.wait()
            kernel.launch(given)
            return out, lse, kept
        given |= of_call(lengths, dropout)
        if changes is not None and layout.changed is not None:
            given |= layout.changed.tensors(changes, out.device)
        run_kernel(kernel, self._combine, given)
        return out, lse, kept

    def dynamic(self) -> DynamicForward | None:
        return DynamicForward(self.layout, self.kernel) if self.is_plain else None

    def launches(self) -> list[BoundLaunch]:
        return [self.kernel.launch, *([] if self._combine is None else [self._combine.launch])]

    def choices(self) -> list[KernelChoice]:
        return [self.kernel.described("forward")]


def forward(
    setting: Setting, key: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, dropped: int,
    changes: Scores | None = None,
) -> Forward:  # fmt: skip
    """The forward of a plan for tensors like these. key: everything that the layout depends on, with the device."""
    layout: ForwardLayout | None = layouts.get(("forward", key))
    if layout is None:
        layout = layouts.put(("forward", key), ForwardLayout(setting, q, k, v, scale, dropped, changes))
    return Forward(layout, setting.plan)

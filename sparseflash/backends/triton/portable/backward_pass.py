"""The backward by the portable kernels, prepared for tensors of one layout; see also `forward_pass.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_gradients_of
from sparseflash.backends.saved import Saved
from sparseflash.backends.triton.family import KernelChoice, Setting
from sparseflash.backends.triton.launch.launches import like, of_call, one_number_of
from sparseflash.backends.triton.launcher import BoundLaunch, LaunchSequence
from sparseflash.backends.triton.portable.dynamic_passes import DynamicBackward
from sparseflash.backends.triton.portable.launches import KernelLayout
from sparseflash.backends.triton.portable.learned import Call, Sums
from sparseflash.backends.triton.portable.merging import Combine, combine_gradients, combine_means, run_kernel
from sparseflash.backends.triton.portable.pass_layout import Layout, layouts
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.blockmask.streams import wait_for
from sparseflash.dropout import Dropout
from sparseflash.scores.change import Scores


class BackwardLayout(Layout):
    """A backward for tensors of one layout, with any plan."""

    def __init__(
        self, setting: Setting, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, scale: float, dropped: int,
        *, dlse: bool, changes: Scores | None = None, wanted: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        super().__init__(setting, q, k, v, scale, dropped, changes, wanted)
        self.learns = any(wanted)
        if changes is not None and (function := changes.find("function")) is not None:
            if function.kernel is not None and function.kernel_derivative is None:
                raise ValueError(
                    "scores.function must have a kernel_derivative for the backward of its kernel; got a kernel alone."
                )
        self.out = like(out)
        # The stride between heads of lse2 and delta; TMA needs a multiple of 16 bytes.
        stride = self.numbers.q_len if self.keep else -(-self.numbers.q_len // 4) * 4
        self.rows = self.lse.new_empty(*self.lse.shape[:2], stride)
        self.some_rows = one_number_of(self.rows, setting.plan.device)
        inputs = [like(x) for x in (q, k, v)]
        self.empty = empty_gradients_of(*inputs)
        self.dq, self.dk, self.dv = map(self.empty, inputs)
        q, k, v, dout = self.examples(q, k, v, dout)
        tiles = {"q": q, "k": k, "v": v}
        strides = {**tiles, "dout": dout, "out": self.out, "dq": self.dq}
        through_lse = {"dlse_ptr": self.lse} if dlse else {}
        self.means: KernelLayout | None = None
        if self.keep:
            found: dict[str, Any] = {"own_rows": (self.rows, self.rows), "inverse_ptr": self.rows}
            self.means = KernelLayout(
                "dq", setting, self.numbers, tiles,
                {"dout_ptr": dout, "out_ptr": self.out, **found, "own_inverse_ptr": self.rows}, strides,
                row_stride=stride, means=True, changed=self.changed, sink=self.sink,
            )  # fmt: skip
            of_queries = {"dout_ptr": dout, **through_lse, **found, "dq_ptr": self.dq}
            of_keys = {"lse2": self.rows, "inverse_ptr": self.rows, "delta": self.rows, **through_lse}
        else:
            of_queries = {
                "dout_ptr": dout, "out_ptr": self.out, "lse_ptr": self.lse, **through_lse,
                "own_rows": (self.rows, self.rows), "dq_ptr": self.dq,
            }  # fmt: skip
            of_keys = {"lse2": self.rows, "delta": self.rows}
        self.queries = KernelLayout(
            "dq", setting, self.numbers, tiles, of_queries, strides, row_stride=stride, changed=self.changed
        )  # fmt: skip
        tiles = {**tiles, "dout": dout}
        self.keys = KernelLayout(
            "dk_dv", setting, self.numbers, tiles, {**of_keys, "dk_ptr": self.dk, "dv_ptr": self.dv},
            {**tiles, "dk": self.dk, "dv": self.dv}, row_stride=stride, changed=self.changed,
        )  # fmt: skip

    def given(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor], dict[str, Any]]:
        """The gradients, lse2 and delta, all empty, and what a call gives the kernels, by name."""
        q, k, v, out, lse, _ = saved
        dq, dk, dv = self.empty(q), self.empty(k), self.empty(v)
        if not self.as_they_are:
            q, k, v, dout = self.operands(q, k, v, dout)
        lse2, delta = torch.empty_like(self.some_rows), torch.empty_like(self.some_rows)  # faster than `unbind`
        given: dict[str, Any] = {
            "q": q, "k": k, "v": v, "dout_ptr": dout, "dout": dout, "out_ptr": out, "lse_ptr": lse, "dlse_ptr": dlse,
            "own_rows": (lse2, delta), "lse2": lse2, "delta_ptr": delta, "delta": delta, "dq_ptr": dq, "dk_ptr": dk,
            "dv_ptr": dv,
        }  # fmt: skip
        return (dq, dk, dv), (lse2, delta), given


class Backward:
    """Computes the gradients of q, k and v."""

    def __init__(self, layout: BackwardLayout, plan: Plan) -> None:
        self.layout = layout
        self.means = None if layout.means is None else layout.means.bind(plan)
        self.queries, self.keys = layout.queries.bind(plan), layout.keys.bind(plan)
        self._planned = [] if layout.changed is None else [kind.planned(plan) for kind in layout.changed.all]
        self._combine_means: Combine | None = None
        if self.means is not None and layout.means is not None:
            self._combine_means = combine_means(self.means, layout.means, layout.rows, layout.sink)
        self._combine_queries = combine_gradients(self.queries, layout.queries, layout.dq)
        self._combine_keys = combine_gradients(self.keys, layout.keys, layout.dk, layout.dv)
        # Both kernels, if nothing comes between them.
        self.kernels: LaunchSequence | None = None
        if self.means is None and self._combine_queries is None and self._combine_keys is None:
            self.kernels = LaunchSequence(self.queries.launch, self.keys.launch)

    def __call__(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, lengths: Tensor | None, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.kernels is None:
            return self._run(dout, dlse, saved, lengths, dropout)[0]
        gradients, _, given = self.layout.given(dout, dlse, saved)  # a fast path for the shortest calls
        if lengths is not None or dropout is not None:
            given |= of_call(lengths, dropout)
        wait_for(self.queries.work.ready, self.keys.work.ready)
        self.kernels(given)
        return gradients

    def dynamic(self) -> DynamicBackward | None:
        return None if self.kernels is None else DynamicBackward(self.layout, self.queries, self.keys)

    def with_learned(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, lengths: Tensor | None, dropout: Dropout | None,
        changes: Scores,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor | None]]:  # fmt: skip
        """`((dq, dk, dv), gradients of the tensors of the score modifications)`."""
        layout = self.layout
        if layout.changed is None or not layout.learns:
            gradients, _ = self._run(dout, dlse, saved, lengths, dropout, changes)
            return gradients, [None] * len(changes.tensors())
        call = Call(layout.numbers, self.queries, self.keys, len(saved.q), saved.q.device)
        sums = Sums(layout.changed, changes, call, self._planned)
        gradients, delta = self._run(dout, dlse, saved, lengths, dropout, changes, sums)
        drow = -delta[:, :, : saved.lse.shape[2]]
        if self.means is not None and dlse is not None:  # in half precision delta includes it
            drow = drow + dlse
        return gradients, sums.gradients(saved.lse, drow)

    def _run(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, lengths: Tensor | None, dropout: Dropout | None,
        changes: Scores | None = None, sums: Sums | None = None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:  # fmt: skip
        """The gradients, and delta `[B, Hq, row stride]`."""
        (dq, dk, dv), (lse2, delta), given = self.layout.given(dout, dlse, saved)
        layout, kept = self.layout, saved.kept
        if lengths is not None or dropout is not None:
            given |= of_call(lengths, dropout)
        if changes is not None and layout.changed is not None:
            given |= layout.changed.tensors(changes, dq.device)
        if self.kernels is not None and sums is None:
            wait_for(self.queries.work.ready, self.keys.work.ready)
            self.kernels(given)
            return (dq, dk, dv), delta
        if self.means is not None and kept is not None:
            (maximum, inverse), own_inverse = kept.unbind(), lse2
            given |= {"own_rows": (maximum, delta), "lse2_ptr": maximum, "lse2": maximum}
            given |= {"inverse_ptr": inverse, "own_inverse_ptr": own_inverse}
            run_kernel(self.means, self._combine_means, given)
            given["inverse_ptr"] = own_inverse
        if sums is not None:
            given |= sums.of_queries()
        run_kernel(self.queries, self._combine_queries, given)
        if sums is not None:
            given |= sums.of_keys()
        run_kernel(self.keys, self._combine_keys, given)
        return (dq, dk, dv), delta

    def launches(self) -> list[BoundLaunch]:
        kernels = [self.means, self.queries, self.keys, self._combine_means, self._combine_queries, self._combine_keys]
        return [each.launch for each in kernels if each is not None]

    def choices(self) -> list[KernelChoice]:
        kernels = {"dq, for delta": self.means, "dq": self.queries, "dk_dv": self.keys}
        return [kernel.described(name) for name, kernel in kernels.items() if kernel is not None]


def backward(
    setting: Setting, key: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, scale: float, dropped: int,
    *, dlse: bool, changes: Scores | None = None, wanted: Sequence[bool] = (),
) -> Backward:  # fmt: skip
    """The backward of a plan for tensors like these. dlse: whether a gradient arrives for lse."""
    layout: BackwardLayout | None = layouts.get(("backward", dlse, key))
    if layout is None:
        made = BackwardLayout(setting, q, k, v, out, dout, scale, dropped, dlse=dlse, changes=changes, wanted=wanted)
        layout = layouts.put(("backward", dlse, key), made)
    return Backward(layout, setting.plan)

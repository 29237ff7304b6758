"""One of the three kernels as a call of its own; the results of other kernels that it reads are computed beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash import BlockMask
from sparseflash.backends.problem import Problem
from sparseflash.backends.saved import Saved
from sparseflash.backends.triton import device as gpu
from sparseflash.backends.triton.configs import Kernel
from sparseflash.backends.triton.portable.backward_pass import Backward, BackwardLayout
from sparseflash.backends.triton.portable.choice import Choice
from sparseflash.backends.triton.portable.forward_pass import Forward, ForwardLayout
from sparseflash.backends.triton.portable.launches import Bound
from sparseflash.backends.triton.portable.merging import Combine, combine_gradients, combine_rows, run_kernel
from sparseflash.backends.triton.prepared_call import setting_of


class KernelCall(NamedTuple):
    """A launch of a kernel, and of the kernel that merges its chunks if there are any."""

    run: Callable[[], None]
    results: list[Tensor]  # what the kernel writes: out; dq; or dk and dv
    choice: Choice


# The attributes of passes and their layouts that hold each kernel, and the kernel that merges its chunks.
_PLACE: dict[Kernel, str] = {"forward": "kernel", "dq": "queries", "dk_dv": "keys"}
# The arguments that the kernel writes, and the results among them.
_WRITTEN: dict[Kernel, tuple[str, ...]] = {
    "forward": ("out_ptr", "lse_ptr", "maximum_ptr", "inverse_ptr"),
    "dq": ("dq_ptr",),
    "dk_dv": ("dk_ptr", "dv_ptr"),
}
_RESULTS: dict[Kernel, tuple[str, ...]] = {**_WRITTEN, "forward": ("out_ptr",)}
_COMBINE: dict[Kernel, Callable[[Bound, Any], Combine | None]] = {
    "forward": lambda kernel, layout: combine_rows(kernel, layout.kernel, layout.written, layout.sink),
    "dq": lambda kernel, layout: combine_gradients(kernel, layout.queries, layout.dq),
    "dk_dv": lambda kernel, layout: combine_gradients(kernel, layout.keys, layout.dk, layout.dv),
}


class KernelOfAttention:
    """A kernel of one attention, and the tensors that a forward and a backward pass to it."""

    def __init__(
        self, kernel: Kernel, mask: BlockMask, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, tf32: bool = False
    ) -> None:
        """The tensors are `[1, H, N, D]`. Runs the kernel, and those before it, with the current overrides."""
        problem = Problem.of(mask, scale=q.shape[-1] ** -0.5)
        setting = setting_of(q, k, problem, gpu.capability_of(q.device))._replace(tf32=tf32)
        self.kernel, self.plan = kernel, setting.plan
        self._layout: Callable[[], Any] = partial(ForwardLayout, setting, q, k, v, problem.scale, 0)
        forward = Forward(self._layout(), self.plan)
        if kernel == "forward":
            launched = _Launched(forward, kernel)
        out, lse, kept = forward(q, k, v, None, None)
        if kernel != "forward":
            self._layout = partial(BackwardLayout, setting, q, k, v, out, dout, problem.scale, 0, dlse=False)
            backward = Backward(self._layout(), self.plan)
            launched = _Launched(backward, kernel)
            backward(dout, None, Saved(q, k, v, out, lse, kept), None, None)
        self._given = launched.given

    def call(self) -> KernelCall:
        """The kernel, prepared again with the current overrides. It writes results of its own."""
        layout = self._layout()
        bound: Bound = getattr(layout, _PLACE[self.kernel]).bind(self.plan)
        written = {name: torch.empty_like(x) for name, x in self._given.items() if name in _WRITTEN[self.kernel]}
        run = partial(run_kernel, bound, _COMBINE[self.kernel](bound, layout), {**self._given, **written})
        return KernelCall(run, [written[name] for name in _RESULTS[self.kernel]], bound.choice)


class _Launched:
    """Replaces a kernel's launch in a pass, and keeps its arguments except buffers for partial results."""

    def __init__(self, run: Forward | Backward, kernel: Kernel) -> None:
        self.given: dict[str, Any] = {}
        self._bound: Bound = getattr(run, _PLACE[kernel])
        setattr(run, _PLACE[kernel], self._bound._replace(launch=self))  # type: ignore[arg-type]

    def __call__(self, given: Mapping[str, Any]) -> None:
        self._bound.launch(given)
        self.given = {name: x for name, x in given.items() if name != "parts_ptr"}

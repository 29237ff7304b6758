"""An attention sink: a key without a value, with one score per head, in each softmax. It changes no other score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.changes.hopper import Given, HopperKind, HopperRequest, examples_of
from sparseflash.backends.triton.changes.kind import Kind, Memory, Request
from sparseflash.backends.triton.device_functions.softmax import LOG2E, exp2_rounded, finite_maximum
from sparseflash.backends.triton.launch.gradient_sums import sink_gradient

if TYPE_CHECKING:
    from sparseflash.backends.triton.hopper.learned import HopperCall
    from sparseflash.backends.triton.portable.learned import Call


@triton.jit
def with_sink(m_i, l_i, sink_ptr, head, qk_scale, KEEP: tl.constexpr):
    sink = tl.load(sink_ptr + head).to(tl.float32)
    if KEEP:
        m_new = finite_maximum(tl.maximum(m_i, sink))
        alpha = tl.exp2((m_i - m_new) * qk_scale)
        return m_new, alpha, l_i * alpha + tl.exp2((sink - m_new) * qk_scale)
    else:
        m_new = finite_maximum(tl.maximum(m_i, sink * LOG2E))
        alpha = tl.exp2(m_i - m_new)
        return m_new, alpha, l_i * alpha + tl.exp2(sink * LOG2E - m_new)


@triton.jit
def means_of_sink(delta, weight, estimate, inverse, maximum, sink_ptr, head):
    exponent = (tl.load(sink_ptr + head).to(tl.float32) - maximum) * LOG2E
    exps = exp2_rounded(tl.minimum(exponent, 0.0))  # above 0 or NaN only for a query without keys
    return delta - exps * inverse * estimate, weight + exps


class SinkKind(Kind):
    """The gradient follows from lse and delta of each query, so no kernel writes it."""

    def __init__(self, change: Any, request: Request, wanted: Sequence[bool]) -> None:
        super().__init__({})
        self._wanted = any(wanted)

    def tensors(self, change: Any, device: torch.device) -> tuple[Tensor, ...]:
        return (aligned_start(change.logits.contiguous()),)

    def gradients(self, change: Any, call: Call, written: Memory) -> list[Tensor | None]:
        return [sink_gradient(change.logits, call.lse, call.drow) if self._wanted else None]


# ---------------------------------------------------------------------- the Hopper kernels


@gluon.jit
def hopper_finish_rows(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, maximum, total, head):
    tensors, _, _, _ = args
    sink = gl.cast(gl.load(tensors[0] + head), gl.float32) * LOG2E
    with_it = gl.maximum(maximum, sink)
    shrinks = gl.exp2(maximum - with_it)
    return with_it, total * shrinks + gl.exp2(sink - with_it), shrinks


class SinkOnHopper(HopperKind):
    """Only the forward adds a sink: the lse that the backward reads includes it."""

    learns = at_all_dims = goes_beside = True
    merging = ("sink_ptr",)

    def __init__(self, change: Any, request: HopperRequest, wanted: Sequence[bool]) -> None:
        self._wanted = any(wanted)
        if not request.backward:
            self.functions = {"finish_rows": hopper_finish_rows}
            self.examples = examples_of(self.tensors(change))

    def tensors(self, change: Any) -> Given:
        return Given((aligned_start(change.logits.contiguous()),)) if self.functions else Given()

    def gradient(self, change: Any, call: HopperCall, written: Given) -> Tensor | None:
        return sink_gradient(change.logits, call.lse, call.drow()) if self._wanted else None

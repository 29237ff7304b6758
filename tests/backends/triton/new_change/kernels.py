"""The device functions of a cap with a learned gain, for the portable kernels and for Hopper."""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.changes.distance import finish, start
from sparseflash.backends.triton.changes.hopper import Given, HopperKind, examples_of
from sparseflash.backends.triton.changes.kind import Kind, Memory
from sparseflash.backends.triton.changes.softcap import has_hardware_tanh, tanh_and_slope
from sparseflash.backends.triton.hopper.record import HEAD, field, received
from sparseflash.backends.triton.hopper.scores import as_float, hyperbolic_tangent


@triton.jit
def apply(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, read, scores, at, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    gain = tl.load(args.tensors[0] + at.head).to(tl.float32)
    ratio, slope = tanh_and_slope(scores / gain, CHANGES.kinds[NUMBER].HARDWARE_TANH)
    return ratio * gain, (slope, ratio - scores / gain * slope)


@triton.jit
def gradient_of_queries(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, sums, ds, kept, at, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    return ds * kept[0], sums + tl.sum(ds * kept[1], 1)


@triton.jit
def gradient(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, sums, ds, kept, at, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    return ds * kept[0], sums


class LearnedCapKind(Kind):
    def __init__(self, change, request, wanted):
        super().__init__({"apply": apply})
        self.facts["HARDWARE_TANH"] = has_hardware_tanh(request)
        self.rows = self.columns = {"gradient": gradient}
        if any(wanted):
            self.rows = {"start": start, "gradient": gradient_of_queries, "finish": finish}
            self.learned = Memory((torch.empty(16, device="meta"),))

    def tensors(self, change, device):
        return (aligned_start(change.gain.contiguous()),)

    def memory(self, change, call, planned):
        return Memory((call.empty_of_queries(),)) if self.learned.rows else Memory()

    def gradients(self, change, call, written):
        return [call.sums_by_head(written.rows[0].sum(1, keepdim=True)).squeeze(1) if written.rows else None]


@gluon.jit
def no_item(CHANGES: gl.constexpr, NUMBER: gl.constexpr):
    return 1.0


@gluon.jit
def begin_item(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, item, C: gl.constexpr, BLOCK_N: gl.constexpr):
    tensors, _, _, _ = args
    return gl.load(tensors[0] + field(item[0], item[1], HEAD))


@gluon.jit
def begin_tile(
    CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, of_item, block, item, C: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    return of_item, False


@gluon.jit
def apply_in_forward(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, buffers, s, gain, step, C: gl.constexpr):
    _, numbers, _, _ = args
    return hyperbolic_tangent(s * (numbers[0] / gain)) * gain, gain


@gluon.jit
def send(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, begun, place, of_tokens, ROWS: gl.constexpr):
    tensors, _, _, _, _, _ = args
    return (gl.cast(gl.load(tensors[0] + place[1]), gl.int32, bitcast=True),), ()


@gluon.jit
def receive(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, step, no_scores):
    return as_float(received(CHANGES, NUMBER, step, 0))


@gluon.jit
def apply_in_backward(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, buffers, s, gain, step):
    _, numbers, _, _, _, _ = args
    return hyperbolic_tangent(s * (numbers[0] / gain)) * gain


@gluon.jit
def derivative(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, p, s, gain):
    ratio = s / gain
    return p * (1.0 - ratio * ratio)


class LearnedCapOnHopper(HopperKind):
    keeps_branch = True
    sent = 1

    @classmethod
    def unit(cls, change):
        return 1.0

    def __init__(self, change, request, wanted):
        self.numbers, self.examples = (request.units.cap_scale,), examples_of(self.tensors(change))
        self.functions = {
            "no_item": no_item, "begin_item": begin_item, "begin_tile": begin_tile, "apply": apply_in_forward
        }  # fmt: skip
        if request.backward:
            self.functions = {"send": send, "begin_tile": receive, "apply": apply_in_backward, "derivative": derivative}

    def tensors(self, change):
        return Given((aligned_start(change.gain.contiguous()),))

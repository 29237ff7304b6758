"""The soft cap of scores: `cap * tanh(score / cap)`."""

from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.backends.triton.availability import INTERPRETED
from sparseflash.backends.triton.changes.hopper import HopperKind, HopperRequest
from sparseflash.backends.triton.changes.kind import Kind, Request
from sparseflash.backends.triton.device_functions.softmax import LOG2E
from sparseflash.backends.triton.hopper.scores import hyperbolic_tangent


@triton.jit
def apply(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, read, scores, at, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    cap, inverse_cap = args.numbers
    ratio, slope = tanh_and_slope(scores * inverse_cap, CHANGES.kinds[NUMBER].HARDWARE_TANH)
    return ratio * cap, slope


@triton.jit
def gradient(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, sums, ds, kept, at, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    return ds * kept, sums


@triton.jit
def tanh(x, HARDWARE_TANH: tl.constexpr):
    return tanh_and_slope(x, HARDWARE_TANH)[0]


@triton.jit
def tanh_and_slope(x, HARDWARE_TANH: tl.constexpr):
    """`(tanh(x), its derivative)`, each to within a few ulps.

    With HARDWARE_TANH the relative error is 2^-11, no more than a rounding to half precision. Without it, the
    derivative follows from 1 - |tanh|: near 1, 1 - tanh^2 would lose most digits.
    """
    if HARDWARE_TANH:
        ratio = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
        return ratio, 1.0 - ratio * ratio
    else:
        missing = 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2E)) + 1.0)
        far = tl.where(x < 0.0, missing - 1.0, 1.0 - missing)
        square = x * x
        series = -1.4558343870513183e-03
        series = series * square + 3.5921280365724810e-03
        series = series * square - 8.8632355299021966e-03
        series = series * square + 2.1869488536155203e-02
        series = series * square - 5.3968253968253968e-02
        series = series * square + 1.3333333333333333e-01
        series = series * square - 3.3333333333333333e-01
        near = x + x * square * series
        is_near = square < 0.25
        return tl.where(is_near, near, far), tl.where(is_near, 1.0 - near * near, missing * (2.0 - missing))


class SoftcapKind(Kind):
    """A soft cap."""

    def __init__(self, change: Any, request: Request, wanted: object) -> None:
        super().__init__({"apply": apply})
        self.numbers = change.cap, 1.0 / change.cap
        self.rows = self.columns = {"gradient": gradient}
        self.facts["HARDWARE_TANH"] = has_hardware_tanh(request)


def has_hardware_tanh(request: Request) -> bool:
    return request.dtype.itemsize == 2 and not INTERPRETED


# ---------------------------------------------------------------------- the Hopper kernels


# A smaller cap leaves nothing of a score, and a larger one does not change it; within these all results are finite.
CAPS = 1e-12, 1e30


@gluon.jit
def hopper_apply(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, buffers, s, of_tile, step, C: gl.constexpr):
    _, numbers, _, _ = args
    return hyperbolic_tangent(s * numbers[0]), of_tile


@gluon.jit
def hopper_apply_again(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, buffers, s, of_tile, step):
    _, numbers, _, _, _, _ = args
    return hyperbolic_tangent(s * numbers[0])


@gluon.jit
def hopper_derivative(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, p, s, of_tile):
    return p * (1.0 - s * s)


class SoftcapOnHopper(HopperKind):
    """It has no tensors, and scores are in units of the cap."""

    at_all_dims = goes_beside = keeps_branch = True

    @classmethod
    def unit(cls, change: Any) -> float | None:
        return float(min(max(change.cap, CAPS[0]), CAPS[1]))

    def __init__(self, change: Any, request: HopperRequest, wanted: object) -> None:
        self.numbers = (request.units.cap_scale,)
        self.functions = {"apply": hopper_apply}
        if request.backward:
            self.functions = {"apply": hopper_apply_again, "derivative": hopper_derivative}

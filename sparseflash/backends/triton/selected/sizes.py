"""What the kernels of one call share: sizes, tiles, strides."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.triton.architecture import architecture_of
from sparseflash.backends.triton.device import capability_of
from sparseflash.backends.triton.device_functions.fp32_split import input_precision
from sparseflash.backends.triton.device_functions.softmax import LOG2E
from sparseflash.backends.triton.selected.tiles import Shape, shape_of
from sparseflash.limits import COUNT


class Sizes(NamedTuple):
    """What all kernels of one call share."""

    batch: int
    kv_heads: int
    group: int
    q_len: int
    k_len: int
    choices: int
    precision: str
    keep: bool
    shape: Shape
    options: dict[str, int]
    qk_scale: float
    scale: float

    @property
    def rows(self) -> int:
        return self.batch * self.kv_heads * self.q_len

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.q_len, self.k_len, self.kv_heads, self.group, self.choices


def sizes_of(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    v_dim: int,
    choices: int,
    scale: float,
    *,
    backward: bool,
    scores: bool = False,
) -> Sizes:
    """What the kernels of a forward or a backward share."""
    keep = q.dtype == torch.float32
    precision = input_precision(q.dtype)
    group = q.shape[1] // k.shape[1]
    shape, warps, stages = shape_of(
        q.shape[3], v_dim, group, size=q.element_size(), keep=keep, precision=precision, shared=v is None,
        backward=backward, far=_reach(k, v) >= COUNT, memory=architecture_of(capability_of(q.device)).shared_memory,
        scores=scores,
    )  # fmt: skip
    return Sizes(
        k.shape[0], k.shape[1], group, q.shape[2], k.shape[2], choices, precision, keep, shape,
        {"num_warps": warps, "num_stages": stages}, scale * LOG2E.value, scale,
    )  # fmt: skip


def _reach(*tensors: Tensor | None) -> int:
    return max(x.shape[2] * x.stride(2) for x in tensors if x is not None)


def readable(x: Tensor) -> Tensor:
    """The tensor with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides_of(*tensors: Tensor | None) -> tuple[tuple[int, ...], ...]:
    """The strides of batch, head and token of each tensor."""
    return tuple((0, 0, 0) if x is None else tuple(x.stride()[:3]) for x in tensors)

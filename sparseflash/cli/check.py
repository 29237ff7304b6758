"""Checks attention with a mask on this machine against dense attention in fp64, on random tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash import BlockMask, attention, testing
from sparseflash.attention import Backend
from sparseflash.cli.inputs import drawn

NAMES = ("out", "lse", "dq", "dk", "dv")


def errors(
    mask: BlockMask,
    *,
    heads: int,
    kv_heads: int | None,
    dim: int,
    dtype: torch.dtype,
    backend: Backend | None,
    seed: int,
) -> dict[str, float]:
    """The error of each result relative to the allowed error; at most 1 is exact."""
    inputs = drawn(mask, batch=1, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, seed=seed)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, mask, return_lse=True, backend=backend)

    x = inputs
    return testing.compare(ours, x.q, x.k, x.v, mask, dout=x.dout, dlse=x.dlse, seed=seed).ratios

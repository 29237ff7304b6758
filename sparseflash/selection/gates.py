"""The gated sum of NSA's branches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.direct import is_plain_call
from sparseflash.masks import fused


def gated_sum(logits: Tensor, *parts: Tensor) -> Tensor:
    """The sum over c of `sigmoid(logits[b, n, c, h]) * parts[c][b, h, n]`: `[B, H, N, D]`.

    logits: `[B, N, 3 * H]`. On a GPU each tensor is read and written once.
    """
    of_one_dtype = logits.dtype in fused.DTYPES and all(x.dtype == logits.dtype for x in parts)
    is_plain = is_plain_call(logits, *parts, may_be_profiled=True)
    if of_one_dtype and logits.numel() and fused.serves(logits, 1, 1) and is_plain:
        found: Tensor = _GatedSum.apply(logits, *parts)  # type: ignore[no-untyped-call]
        return found
    return _by_operations(logits, *parts)


def _by_operations(logits: Tensor, *parts: Tensor) -> Tensor:
    gates = torch.sigmoid(logits).unflatten(2, (3, -1)).permute(2, 0, 3, 1).unsqueeze(-1)  # [3, B, H, N, 1]
    out: Tensor = gates[0] * parts[0] + gates[1] * parts[1] + gates[2] * parts[2]
    return out


class _GatedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, *parts: Tensor) -> Tensor:
        from sparseflash.backends.triton.selected import gates  # imports Triton

        ctx.save_for_backward(logits, *parts)
        return gates.forward(logits, parts)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        from sparseflash.backends.triton.selected import gates

        logits, *parts = ctx.saved_tensors
        if torch.is_grad_enabled():  # for gradients of gradients
            # Views: a tensor may be given twice or be computed from another, whose gradient must not include its own.
            given = [x.view_as(x) for x in (logits, *parts)]
            wanted = [x for x in given if x.requires_grad]
            found = iter(torch.autograd.grad(_by_operations(*given), wanted, dout, create_graph=True))
            return tuple(next(found) if x.requires_grad else None for x in given)
        return gates.backward(dout, logits, tuple(parts))

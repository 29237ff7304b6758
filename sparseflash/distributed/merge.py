"""Merging attention over parts of the keys into attention over all of them, in a fixed order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sparseflash.backends.triton.device import runs_kernels
from sparseflash.scores.sink import above, scaled

_DEVICES = ["cuda"]  # devices that use the kernels of `fused_merge`; tests add the CPU, for the interpreter


def merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of attention over the union of disjoint sets of keys, from `(out, lse)` over each set.

    >>> from sparseflash import attention
    >>> q, k, v = (torch.randn(1, 2, 8, 16, dtype=torch.float64) for _ in range(3))
    >>> halves = [attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(3), slice(3, 8))]
    >>> torch.allclose(merged(halves)[0], attention(q, k, v))
    True

    With `lse = log(sum(exp(lse_s)))`, `out = sum(exp(lse_s - lse) * out_s)`, summed in the order of the parts, in fp32
    (fp64 for fp64 inputs). A query without keys in any part has `out = 0` and `lse = -inf`. Differentiable.
    """
    if not parts:
        raise ValueError("parts must be of at least one set of keys; got none.")
    if len(parts) == 1:
        return parts[0]
    out, lse = _Merge.apply(len(parts), *(out for out, _ in parts), *(lse for _, lse in parts))  # type: ignore[no-untyped-call]
    return out, lse


def with_sink(out: Tensor, lse: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """`(out, lse)` after a sink has joined the softmax: one more key with the score `logits [H]` and the value 0.

    >>> out, lse = with_sink(torch.ones(1, 1, 2, 4), torch.tensor([[[0.0, -torch.inf]]]), torch.zeros(1))
    >>> out[0, 0, 0].tolist(), lse.tolist()
    ([0.5, 0.5, 0.5, 0.5], [[[0.6931471824645996, -inf]]])

    Queries without a live key, which have `out = 0` and `lse = -inf`, keep them. Differentiable.
    """
    joined_out, joined_lse = _WithSink.apply(out, lse, logits)  # type: ignore[no-untyped-call]
    return joined_out, joined_lse


class _WithSink(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(out, lse, logits)
        joined = torch.logaddexp(lse, logits.to(lse.dtype)[:, None]).masked_fill(lse == -torch.inf, -torch.inf)
        return scaled(out, lse, logits), joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dout, dlse = gradients
        out, lse, logits = ctx.saved_tensors
        difference = above(lse, logits)
        # Each by its own sigmoid: the sink's share of a sum is often small, and 1 - share would lose its digits.
        share, of_sink = torch.sigmoid(difference), torch.sigmoid(-difference)
        dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
        product = (dout * out.to(lse.dtype)).sum(-1)
        dlogits = of_sink.masked_fill(lse == -torch.inf, 0.0) * (dlse - share * product)
        return (
            (share.unsqueeze(-1) * dout).to(out.dtype),
            share * (of_sink * product + dlse),
            dlogits.sum((0, 2)).to(logits.dtype),
        )


class _Merge(Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        outs, lses = tensors[:count], tensors[count:]
        ctx.save_for_backward(*tensors)
        if _is_fused(outs[0]):
            from sparseflash.distributed import fused_merge

            return fused_merge.merge(outs, lses)
        lse, weights = _weights(lses)
        out = _weighted_sum(outs, weights)
        return out.to(outs[0].dtype), lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dout, dlse = gradients
        tensors = ctx.saved_tensors
        count = len(tensors) // 2
        outs, lses = tensors[:count], tensors[count:]
        if _is_fused(outs[0]):
            from sparseflash.distributed import fused_merge

            of_outs, of_lses = fused_merge.merge_backward(dout, dlse, outs, lses)
            return None, *of_outs, *of_lses
        lse, weights = _weights(lses)
        # Recomputed rather than saved: its difference from a part would be inexact in half precision.
        out = _weighted_sum(outs, weights)
        dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
        douts, dlses = [], []
        for part, weight in zip(outs, weights, strict=True):
            douts.append((weight.unsqueeze(-1) * dout).to(part.dtype))
            dlses.append(weight * ((dout * (part - out)).sum(-1) + dlse))
        return None, *douts, *dlses


def _is_fused(x: Tensor) -> bool:
    return x.device.type in _DEVICES and x.dtype != torch.float64 and type(x) is Tensor and runs_kernels(x.device)


def _weights(lses: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
    """`lse` of all parts, and the share of each part in the sum of exponentials: 0 where there is no key."""
    highest = lses[0]
    for each in lses[1:]:
        highest = torch.maximum(highest, each)
    safe = highest.masked_fill(highest == -torch.inf, 0.0)  # -inf - -inf would be NaN
    shares = [torch.exp(each - safe) for each in lses]
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    divisor = total.masked_fill(total == 0, 1.0)
    return safe + torch.log(total), [share / divisor for share in shares]


def _weighted_sum(outs: tuple[Tensor, ...], weights: list[Tensor]) -> Tensor:
    out = weights[0].unsqueeze(-1) * outs[0]
    for part, weight in zip(outs[1:], weights[1:], strict=True):
        out = out + weight.unsqueeze(-1) * part
    return out

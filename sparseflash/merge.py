"""`merge_attention`: attention over parts of the keys, merged into attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import Function

from sparseflash.backends.triton.device import runs_kernels
from sparseflash.scores.change import FLOATING
from sparseflash.scores.sink import above, scaled

_DEVICES = ["cuda"]  # devices that use the kernels of `backends/triton/merge`; tests add the CPU, for the interpreter


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of attention over the union of disjoint sets of keys, from `(out, lse)` over each set.

    >>> from sparseflash import attention
    >>> q, k, v = (torch.randn(1, 2, 8, 16, dtype=torch.float64) for _ in range(3))
    >>> halves = [attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(3), slice(3, 8))]
    >>> out, lse = merge_attention(*zip(*halves))
    >>> torch.allclose(out, attention(q, k, v))
    True

    With `lse = log(sum(exp(lses[s])))`, `out = sum(exp(lses[s] - lse) * outs[s])`. The sums are in the order of the
    parts, in fp32 (fp64 for fp64 inputs). Gradients reach all outs and lses.

    Args:
        outs: the results over the parts, `[..., Nq, Dv]`, all of one shape, dtype and device.
        lses: their natural logarithms of the sums of exponentials, `[..., Nq]`, as `attention(..., return_lse=True)`
            returns them. -inf: the query has no keys in that part, whatever its out holds.

    Returns:
        `(out [..., Nq, Dv], lse [..., Nq])`. A query without keys in any part has `out = 0` and `lse = -inf`.

    A sink is a key as well: pass `scores=scores.sink(logits)` to one of the calls only. A query without other keys in
    that part has the sink's logit as lse.

    Raises TypeError or ValueError for parts that do not fit together.
    """
    outs, lses = _checked(outs, lses)
    shape = outs[0].shape
    if len(shape) != 4:
        at = (1,) * (4 - len(shape))
        outs = [out.reshape(*at, *shape) if at else out.flatten(0, -4) for out in outs]
        lses = [lse.reshape(outs[0].shape[:3]) for lse in lses]
    merged_out, merged_lse = _Merge.apply(len(outs), *outs, *lses)  # type: ignore[no-untyped-call]
    if len(shape) != 4:
        merged_out, merged_lse = merged_out.reshape(shape), merged_lse.reshape(shape[:-1])
    return merged_out, merged_lse


def _checked(*given_: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    lists: list[list[Tensor]] = []
    for name, given in zip(("outs", "lses"), given_, strict=True):
        try:
            parts = list(given)
        except TypeError:
            raise TypeError(
                f"{name} must be a sequence of tensors, one for each part; got {type(given).__name__}."
            ) from None
        for x in parts:
            if not isinstance(x, Tensor) or x.dtype not in FLOATING:
                what = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"{name} must be tensors of a floating dtype; got {what}.")
        lists.append(parts)
    outs, lses = lists
    if not len(outs) or len(outs) != len(lses):
        raise ValueError(f"outs and lses must be of equally many parts, at least one; got {len(outs)} and {len(lses)}.")
    first = outs[0]
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != first.shape or out.ndim < 2 or out.dtype != first.dtype:
            raise ValueError(
                "outs must have one shape [..., Nq, Dv] and one dtype; got "
                f"{list(first.shape)} of {first.dtype} and {list(out.shape)} of {out.dtype}."
            )
        if lse.shape != out.shape[:-1]:
            raise ValueError(
                f"lses must have shape {list(out.shape[:-1])}, as outs without the last dimension; got "
                f"{list(lse.shape)}. FlashAttention's lse of packed tokens is [heads, tokens]: transpose it."
            )
        if out.device != first.device or lse.device != first.device:
            raise ValueError(f"outs and lses must be on one device; got {first.device}, {out.device} and {lse.device}.")
    dtype = torch.promote_types(first.dtype, torch.float32)
    return outs, [lse.to(dtype) for lse in lses]


def with_sink(out: Tensor, lse: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """`(out, lse)` after a sink has joined the softmax: one more key with the score `logits [H]` and the value 0.

    >>> out, lse = with_sink(torch.ones(1, 1, 2, 4), torch.tensor([[[0.0, -torch.inf]]]), torch.zeros(1))
    >>> out[0, 0, 0].tolist(), lse.tolist()
    ([0.5, 0.5, 0.5, 0.5], [[[0.6931471824645996, 0.0]]])

    A query without a live key, which has `out = 0` and `lse = -inf`, gets the lse of the sink alone. Differentiable.
    """
    joined_out, joined_lse = _WithSink.apply(out, lse, logits)  # type: ignore[no-untyped-call]
    return joined_out, joined_lse


class _WithSink(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(out, lse, logits)
        return scaled(out, lse, logits), torch.logaddexp(lse, logits.to(lse.dtype)[:, None])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dout, dlse = gradients
        out, lse, logits = ctx.saved_tensors
        difference = above(lse, logits)
        # Each by its own sigmoid: the sink's share of a sum is often small, and 1 - share would lose its digits.
        share, of_sink = torch.sigmoid(difference), torch.sigmoid(-difference)
        dead = (logits == -torch.inf)[:, None]  # a head without a sink
        of_sink = of_sink.masked_fill(dead, 0.0)
        dlse = dlse.masked_fill(dead & (lse == -torch.inf), 0.0)
        product = (dout * out.to(lse.dtype)).sum(-1)
        dlogits = of_sink * (dlse - share * product)
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
            from sparseflash.backends.triton import merge

            return merge.merge(outs, lses)
        lse, weights = _weights(lses)
        return _weighted_sum(_without_dead(outs, lses), weights).to(outs[0].dtype), lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dout, dlse = gradients
        tensors = ctx.saved_tensors
        count = len(tensors) // 2
        outs, lses = tensors[:count], tensors[count:]
        if _is_fused(outs[0]) and not (torch.is_grad_enabled() or any(map(is_legacy_batchedtensor, gradients))):
            from sparseflash.backends.triton import merge

            of_outs, of_lses = merge.merge_backward(dout, dlse, outs, lses)
            return None, *of_outs, *of_lses
        lse, weights = _weights(lses)
        outs = _without_dead(outs, lses)
        # Recomputed rather than saved: its difference from a part would be inexact in half precision.
        out = _weighted_sum(outs, weights)
        dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
        douts, dlses = [], []
        for part, weight in zip(outs, weights, strict=True):
            douts.append((weight.unsqueeze(-1) * dout).to(part.dtype))
            dlses.append(weight * ((dout * (part - out)).sum(-1) + dlse))
        return None, *douts, *dlses


def _is_fused(x: Tensor) -> bool:
    if x.device.type not in _DEVICES or x.dtype == torch.float64 or type(x) is not Tensor:
        return False
    return x.numel() > 0 and not torch.compiler.is_compiling() and runs_kernels(x.device)


def _without_dead(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> list[Tensor]:
    """The outs, with 0 for queries without keys, because 0 times NaN is NaN."""
    return [out.masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0) for out, lse in zip(outs, lses, strict=True)]


def _weights(lses: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
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


def _weighted_sum(outs: Sequence[Tensor], weights: list[Tensor]) -> Tensor:
    out = weights[0].unsqueeze(-1) * outs[0]
    for part, weight in zip(outs[1:], weights[1:], strict=True):
        out = out + weight.unsqueeze(-1) * part
    return out

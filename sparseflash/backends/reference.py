"""The definition: masked softmax attention on whole matrices, in plain PyTorch.

Every other backend must compute the same; tests compare with this one in fp64. fp16 and bf16 are computed in fp32 and
rounded at the end, because scores above 65,504 overflow in fp16. `attention_of_live` rounds every step to its inputs'
dtype instead; its error bounds the other backends' errors. Memory grows with `Nq * Nk`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.autocast import without_autocast
from sparseflash.blockmask import BlockMask
from sparseflash.dropout import Dropout, amplification, kept_everywhere
from sparseflash.scores.change import Place, Scores


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, scale: float, dropout: Dropout | None = None,
    changes: Scores | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out [B, Hq, Nq, Dv], lse [B, Hq, Nq])`, differentiable by autograd.

    A query without a live key has `out = 0` and `lse = -inf`, and passes on no gradient. `lse` is fp32 for inputs of
    lower precision. changes: prepared for these sizes.
    """
    return attention_to_live(q, k, v, None if mask is None else mask.to_dense(), scale, dropout, changes)


def attention_to_live(
    q: Tensor, k: Tensor, v: Tensor, live: Tensor | None, scale: float, dropout: Dropout | None = None,
    changes: Scores | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` with the live scores as bools, `[B or 1, Hq or 1, Nq, Nk]`."""
    wide = _lse_dtype(q)
    if wide == q.dtype:
        return attention_of_live(q, k, v, live, scale, dropout, changes)
    with without_autocast(q.device):
        out, lse = attention_of_live(q.to(wide), k.to(wide), v.to(wide), live, scale, dropout, changes)
    return out.to(q.dtype), lse


def attention_of_live(
    q: Tensor, k: Tensor, v: Tensor, live: Tensor | None, scale: float, dropout: Dropout | None = None,
    changes: Scores | None = None, at: Place | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attention_to_live` with every step in the inputs' own dtype.

    at: the positions of the scores, if only a part of the problem of `changes`.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # [B, Hq, Nk, D]
    scores = _product(q, k.transpose(-1, -2)) * scale  # [B, Hq, Nq, Nk]
    if changes is not None:
        at = Place.everywhere(scores.shape, scores.device) if at is None else at
        scores = changes.changed(scores, at)
    if live is not None:
        scores = scores.masked_fill(~live, -torch.inf)
    none = k.shape[2] == 0
    highest = scores.new_full((*scores.shape[:-1], 1), -torch.inf) if none else scores.detach().amax(-1, keepdim=True)
    sink = None if changes is None else changes.find("sink")
    if sink is not None and at is not None:
        logits = sink.logits[at.head].to(scores.dtype)
        highest = torch.maximum(highest, logits.detach())
    # Without a live key the maximum is -inf, and -inf - -inf is NaN; any finite number gives exp(-inf) = 0 instead.
    weights = torch.exp(scores - highest.masked_fill(highest == -torch.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    empty = highest == -torch.inf
    if sink is not None:
        total = total + torch.exp(logits - highest.masked_fill(empty, torch.inf))
    weights = weights / total.masked_fill(empty, 1.0)
    if dropout is not None:
        keep = kept_everywhere(dropout, *weights.shape)
        weights = weights.masked_fill(~keep, 0.0) * amplification(dropout.dropped)
    out = _product(weights, v)
    lse = highest + torch.log(total.masked_fill(empty, 1.0))
    return out, lse.squeeze(-1).to(_lse_dtype(q))


def _product(x: Tensor, y: Tensor) -> Tensor:
    """`x @ y`, summed in fp32 and rounded once. For fp16 on CPUs PyTorch's own loops take ten times as long as BLAS in
    fp32."""
    if x.dtype == torch.float16 and x.device.type == "cpu":
        return (x.float() @ y.float()).to(x.dtype)
    return x @ y


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)

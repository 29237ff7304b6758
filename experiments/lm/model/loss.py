"""Cross-entropy from features, without all logits in memory at once.

65,536 tokens with GPT-2's vocabulary have 13 GB of fp32 logits. So each chunk of tokens goes forward and backward at
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_BYTES = 2**30


def loss_and_gradient(logits: Tensor, labels: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies of logits [M, V], fp32, and the gradient of `factor` times the sum. On a GPU the
    gradient overwrites the logits."""
    if logits.is_cuda:
        from experiments.lm.model.fused_loss import fused_loss_and_gradient

        return fused_loss_and_gradient(logits, labels, factor)
    return plain_loss_and_gradient(logits, labels, factor)


def plain_loss_and_gradient(logits: Tensor, labels: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    scores = logits.float()
    lse = scores.logsumexp(-1, keepdim=True)
    label = labels[:, None]
    losses = lse - scores.gather(-1, label)
    right = torch.arange(scores.shape[-1], device=scores.device) == label
    gradient = (((scores - lse).exp() - right.float()) * factor).to(logits.dtype)
    return losses.sum(), gradient


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        head = weight.to(features.dtype)
        total = features.new_zeros((), dtype=torch.float32)
        features_gradient, weight_gradient = torch.empty_like(features), torch.zeros_like(weight, dtype=torch.float32)
        for part in chunks(features, weight):
            chunk = features[part]
            loss, chunk_gradient = loss_and_gradient(chunk @ head.T, labels[part], 1 / len(features))
            total += loss
            torch.mm(chunk_gradient, head, out=features_gradient[part])
            weight_gradient += chunk_gradient.T @ chunk
        ctx.dtype = weight.dtype
        ctx.save_for_backward(features_gradient, weight_gradient)
        return total / len(features)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        features_gradient, weight_gradient = ctx.saved_tensors
        of_features = features_gradient * upstream.to(features_gradient.dtype)
        return of_features, (weight_gradient * upstream).to(ctx.dtype), None


def mean_loss(features: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy, nats, of features [T, W] with the head's weight [V, W] and labels [T]."""
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(features, weight, labels)  # type: ignore[no-any-return,no-untyped-call]
    return token_losses(features, weight, labels).mean()


@torch.no_grad()
def token_losses(features: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    head = weight.to(features.dtype)
    found = [
        F.cross_entropy((features[part] @ head.T).float(), labels[part], reduction="none")
        for part in chunks(features, weight)
    ]
    return torch.cat(found)


def chunks(features: Tensor, weight: Tensor) -> Iterator[slice]:
    tokens = size = len(features)
    most = max(1, CHUNK_BYTES // (len(weight) * features.element_size()))
    while size > most and size % 2 == 0:
        size //= 2
    size = min(size, most)
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))

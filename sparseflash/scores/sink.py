"""A learned score that takes part in the softmax but has no value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflash.scores.change import Change, Place, Sizes, floating, per_head


@dataclass(frozen=True, eq=False)
class Sink(Change):
    """Adds `exp(logits[h])` to every sum of exponentials of head h."""

    kind = "sink"
    order = 8
    logits: Tensor  # [Hq]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.logits,)

    def prepared(self, sizes: Sizes) -> Sink:
        per_head(self.logits, "logits", sizes)
        return self

    def changed(self, scores: Tensor, at: Place) -> Tensor:
        return scores  # backends add the sink to the sum of exponentials


def scaled(out: Tensor, lse: Tensor, logits: Tensor) -> Tensor:
    """The output `[B, H, Nq, Dv]` after a sink has joined the softmax.

    >>> scaled(torch.ones(1, 1, 2, 4), torch.tensor([[[0.0, -torch.inf]]]), torch.zeros(1))[0, 0].tolist()
    [[0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0]]

    `out * exp(lse) / (exp(lse) + exp(logits[h]))`, computed in the dtype of lse, `[B, H, Nq]`: 0 for a query without a
    live key, where lse is -inf.
    """
    return (torch.sigmoid(above(lse, logits)).unsqueeze(-1) * out).to(out.dtype)


def completed(lse: Tensor, logits: Tensor) -> Tensor:
    """The lse `[B, H, N]` of queries with a sink: its logit for queries without a live key, whose lse is -inf.

    >>> completed(torch.tensor([[[0.0, -torch.inf]]]), torch.tensor([2.0])).tolist()
    [[[0.0, 2.0]]]

    Differentiable by both.
    """
    own = logits.to(lse.dtype)[:, None]
    return torch.where((lse == -torch.inf) & (own != -torch.inf), own, lse)


def above(lse: Tensor, logits: Tensor) -> Tensor:
    """`lse - logits[h]`, also for logits of -inf: -inf for a query without a live key."""
    return (lse - logits.to(lse.dtype)[:, None]).masked_fill(lse == -torch.inf, -torch.inf)


def sink(logits: Tensor) -> Sink:
    """Adds a key with the score `logits[h]` and the value 0 for each query, so that a head may attend to nothing.

    >>> import torch
    >>> from sparseflash import attention, scores
    >>> q, k, v = (torch.randn(1, 2, 50, 16) for _ in range(3))
    >>> attention(q, k, v, scores=scores.sink(torch.zeros(2))).shape
    torch.Size([1, 2, 50, 16])

    Args:
        logits: `[Hq]`, which may be learned; finite, or -inf for a head without a sink. No other score modification
            applies to them, nor does the scale or dropout.

    `lse` includes the sink. For a query without a live key, `out = 0` and lse is the sink's logit, as in
    FlashAttention-4. To merge parts of the keys (`merge_attention`), give one of them the sink.

    Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025; with logits 0 it is Miller's "Attention Is Off By
    One", 2023.
    """
    logits = floating(logits, "logits")
    if logits.ndim != 1:
        raise ValueError(f"logits must have shape [Hq]; got {list(logits.shape)}.")
    return Sink(logits)

"""A number for each key that is added to its scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflash.scores.change import Change, Learned, Place, Sizes, add_at, broadcasts, floating, shared_or_own


@dataclass(frozen=True, eq=False)
class KeyBias(Change):
    """Adds `values[b, h, j]`; dimensions of size 1 are shared."""

    kind = "key_bias"
    order = 4
    values: Tensor  # [B or 1, Hq or 1, Nk or 1]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def prepared(self, sizes: Sizes) -> KeyBias:
        broadcasts(self.values, "key_bias", "B, Hq, Nk", (sizes.batch, sizes.heads, sizes.k_len), sizes)
        return self

    def joined(self, other: Change) -> KeyBias:
        # In fp32 at least, as scores are: in half precision the sum would be rounded.
        wide = self.values.to(torch.promote_types(self.values.dtype, torch.float32))
        return KeyBias(torch.add(wide, *other.tensors()))

    def changed(self, scores: Tensor, at: Place) -> Tensor:
        indices = shared_or_own(self.values, [at.batch, at.head, at.key])
        return scores + self.values[tuple(indices)].to(scores.dtype)

    def gradient(self, gradient: Tensor, scores: Tensor, changed: Tensor, at: Place, learned: Learned) -> Tensor:
        add_at(learned[0], shared_or_own(self.values, [at.batch, at.head, at.key]), gradient)
        return gradient


def key_bias(values: Tensor) -> KeyBias:
    """Adds `values[b, h, j]` to every score of key j, such as a forgetting gate, or `log(n)` for a key that stands for
    n equal keys.

    >>> import torch
    >>> from sparseflash import attention, scores
    >>> q, k, v = (torch.randn(2, 4, 50, 16) for _ in range(3))
    >>> attention(q, k, v, scores=scores.key_bias(torch.randn(2, 1, 50))).shape
    torch.Size([2, 4, 50, 16])

    values: `[B or 1, Hq or 1, Nk]`, which may be learned; finite, or -inf for a dead key.
    """
    values = floating(values, "key_bias")
    if values.ndim != 3:
        raise ValueError(
            f"key_bias must have shape [B or 1, Hq or 1, Nk]; got {list(values.shape)}. For x [B, Nk] pass x[:, None]."
        )
    return KeyBias(values)

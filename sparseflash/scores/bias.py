"""A tensor that is added to the scores."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparseflash.scores.change import Change, Learned, Place, Sizes, add_at, broadcasts, floating, shared_or_own
from sparseflash.scores.key_bias import KeyBias


@dataclass(frozen=True, eq=False)
class Bias(Change):
    """Adds `bias[b, h, i, j]`; dimensions of size 1 are shared."""

    kind = "bias"
    order = 5
    values: Tensor  # [B or 1, Hq or 1, Nq or 1, Nk or 1]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def prepared(self, sizes: Sizes) -> Change:
        broadcasts(self.values, "bias", "B, Hq, Nq, Nk", sizes[:4], sizes)
        return KeyBias(self.values[:, :, 0]) if self.values.shape[2] == 1 else self

    def changed(self, scores: Tensor, at: Place) -> Tensor:
        indices = shared_or_own(self.values, [at.batch, at.head, at.query, at.key])
        return scores + self.values[tuple(indices)].to(scores.dtype)

    def gradient(self, gradient: Tensor, scores: Tensor, changed: Tensor, at: Place, learned: Learned) -> Tensor:
        add_at(learned[0], shared_or_own(self.values, [at.batch, at.head, at.query, at.key]), gradient)
        return gradient


def bias(values: Tensor) -> Bias:
    """Adds `values[b, h, i, j]` to the score of query i and key j.

    >>> import torch
    >>> from sparseflash import attention, scores
    >>> q, k, v = (torch.randn(2, 4, 50, 16) for _ in range(3))
    >>> pair = torch.randn(1, 4, 50, 50, requires_grad=True)
    >>> attention(q, k, v, scores=scores.bias(pair)).shape
    torch.Size([2, 4, 50, 16])

    Args:
        values: `[B or 1, Hq or 1, Nq or 1, Nk or 1]`, which may be learned; a size of 1 is shared. Only entries of live
            scores are read; the gradients of the others are 0. An entry is finite, or -inf for a dead score, which is
            still computed.

    A bias that is the same for all queries (`Nq` is 1) becomes a `key_bias`, whose gradient needs no `[Nq, Nk]`. For
    shared values the Triton kernels store the gradient of each batch element and head in fp32 before they sum. The
    Hopper kernels are fastest if values have the dtype of q and rows that begin at multiples of 16 bytes; values that a
    dimension shares learn in the portable kernels. `tile_bias` stores live tiles only.
    """
    values = floating(values, "bias")
    if values.ndim != 4:
        raise ValueError(
            f"bias must have shape [B or 1, Hq or 1, Nq or 1, Nk or 1]; got {list(values.shape)}. Add the missing "
            "dimensions of size 1."
        )
    return Bias(values)

"""The lengths of padded sequences, as `BlockMask.with_lengths` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseflash.blockmask.arguments import dense_tensor, integer_tensor

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask

Lengths = Tensor | Sequence[int]


def lengths_of(
    mask: BlockMask, lengths: Lengths | None, q_lengths: Lengths | None, k_lengths: Lengths | None
) -> Tensor:
    """The live queries and keys of each sequence, int32 `[2, B]`, clamped to the mask's lengths."""
    if lengths is not None:
        if q_lengths is not None or k_lengths is not None:
            raise TypeError("lengths must be given alone: it sets q_lengths and k_lengths to the same numbers.")
        lengths = _checked(mask, lengths, "lengths")
        if mask.q_len == mask.k_len:
            lengths = lengths.clamp(0, mask.q_len).to(torch.int32)
            return lengths.expand(2, -1)
        q_lengths = k_lengths = lengths
    q = None if q_lengths is None else _checked(mask, q_lengths, "q_lengths").clamp(0, mask.q_len)
    k = None if k_lengths is None else _checked(mask, k_lengths, "k_lengths").clamp(0, mask.k_len)
    if q is None and k is None:
        raise TypeError("with_lengths must be given lengths, q_lengths or k_lengths; got none of them.")
    q = torch.full_like(k, mask.q_len) if q is None and k is not None else q
    k = torch.full_like(q, mask.k_len) if k is None and q is not None else k
    if q is None or k is None or q.shape != k.shape:
        got = [None if x is None else list(x.shape) for x in (q, k)]
        raise ValueError(f"q_lengths and k_lengths must have one batch size; got {got[0]} and {got[1]}.")
    return torch.stack([q, k]).to(torch.int32)


def _checked(mask: BlockMask, lengths: Lengths, name: str) -> Tensor:
    """Lengths as int64 unless they are int32: smaller types may not hold the bounds, and some cannot be clamped."""
    if isinstance(lengths, Tensor) and dense_tensor(lengths, name).ndim == 2:
        raise ValueError(
            f"{name} must have shape [B]; got {list(lengths.shape)}. Of a mask [B, N] that is True for tokens, all of "
            "them in front, pass its .sum(-1)."
        )
    if not (isinstance(lengths, Tensor) and lengths.dtype == torch.int32):
        lengths = integer_tensor(lengths, name, mask.device)
    batch = mask.pattern.shape[0]
    if lengths.ndim != 1 or (batch != 1 and lengths.shape[0] != batch):
        want = "B" if batch == 1 else str(batch)
        raise ValueError(f"{name} must have shape [{want}]; got {list(lengths.shape)}.")
    if lengths.device != mask.device:
        raise ValueError(f"{name} must be on the mask's device {mask.device}; got {lengths.device}.")
    return lengths

"""FlashAttention's arguments that change scores: `alibi_slopes` for batch elements and sequences, `softcap`, sinks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflash import scores
from sparseflash.blockmask.arguments import dense_tensor, integers
from sparseflash.scores.change import Change, Scores

# One object each, so that what it records is recorded once.
_nothing = torch.zeros(0, device="cpu")
_of_batch = scores.function(
    lambda score, b, h, q, k, slopes, shift: score - slopes[b, h] * (q + shift - k).abs(), _nothing, _nothing
)
_of_sequences = scores.function(
    lambda score, b, h, q, k, slopes, row, shift: score - slopes[row[q], h] * (q + shift[q] - k).abs(), *[_nothing] * 3
)


def alibi_of_batch(slopes: Tensor, q: Tensor, batch: int, shift: int) -> Change:
    """ALiBi of slopes `[Hq]` or `[B, Hq]`; shift: `Nk - Nq`.

    >>> alibi_of_batch(torch.ones(2), torch.zeros(3, 10, 2, 16), 3, 0).kind
    'distance'
    """
    if dense_tensor(slopes, "alibi_slopes").ndim == 1:
        return scores.alibi(slopes)
    _check_slopes(slopes, (batch, q.shape[-2]))
    return _of_batch.with_tensors([slopes.to(_precise(q)), torch.tensor(shift, device=q.device)])


def alibi_of_sequences(slopes: Tensor, q: Tensor, k: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any) -> Change:
    """ALiBi of slopes `[Hq]`, or `[B, Hq]` for B packed sequences.

    >>> x = torch.zeros(10, 2, 16)
    >>> alibi_of_sequences(torch.ones(2), x, x, [0, 4, 10], [0, 4, 10]).kind
    'distance'

    In packed tokens the distance of query i and key j of a sequence is `|i + end of keys - end of queries - j|`.
    """
    q_sums = integers(cu_seqlens_q, "cu_seqlens_q").cpu()
    k_sums = q_sums if cu_seqlens_k is None else integers(cu_seqlens_k, "cu_seqlens_k").cpu()
    shifts = (k_sums - q_sums)[1:]
    if dense_tensor(slopes, "alibi_slopes").ndim == 1:
        if bool((shifts == len(k) - len(q)).all()):
            return scores.alibi(slopes)
        slopes = slopes.expand(len(shifts), -1)
    _check_slopes(slopes, (len(shifts), q.shape[-2]))
    row = torch.repeat_interleave(torch.arange(len(shifts), device="cpu"), q_sums.diff())
    tensors = [slopes.to(_precise(q)), row.to(q.device), shifts[row].to(q.device)]
    return _of_sequences.with_tensors(tensors)


def _precise(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _check_slopes(slopes: Tensor, wanted: tuple[int, int]) -> None:
    if tuple(slopes.shape) != wanted:
        raise ValueError(f"alibi_slopes must have shape [Hq] or {list(wanted)}; got {list(slopes.shape)}.")


def score_changes(softcap: float, learnable_sink: Tensor | None) -> Scores:
    """A soft cap, 0 for none, and a sink, None for none.

    >>> score_changes(30.0, None).kinds
    ('softcap',)
    """
    changes = Scores(())
    if softcap:
        changes = changes + scores.softcap(softcap)
    if learnable_sink is not None:
        changes = changes + scores.sink(learnable_sink)
    return changes

"""The CPU backend: PyTorch over the live tiles only, with gradients, in fp16, bf16, fp32 and fp64.

Block rows with equally many tiles are computed together: the keys and values of their tiles are gathered side by side,
and the rest is ordinary softmax attention, a few block rows at a time. The backward recomputes scores. So memory grows
with the inputs and the mask, not with `Nq * Nk`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sparseflash.autocast import without_autocast
from sparseflash.backends.blockwise_tiles import Tiles
from sparseflash.backends.operators import Operator
from sparseflash.backends.problem import Problem
from sparseflash.backends.registration import empty_gradient, empty_lse, empty_out
from sparseflash.backends.saved import Saved
from sparseflash.scores.change import Scores


def _as_given(function: Callable[..., Any]) -> Callable[..., Any]:
    """Disables autocast: the inputs have been cast already, and products in fp32 must stay in fp32."""

    @wraps(function)
    def run(q: Tensor, *rest: Any) -> Any:
        with without_autocast(q.device):
            return function(q, *rest)

    return run


@_as_given
def _forward(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores | None
) -> tuple[Tensor, Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0:
        return empty_out(q, v).zero_(), empty_lse(q).fill_(-torch.inf), _empty_kept(q)
    mask, scale, dropout = Tiles(q, k, problem), problem.scale, problem.dropout
    q_tiles, k_tiles = mask.cut(q, mask.height, last=True), mask.cut(k, mask.block_k, last=True)
    v_tiles = mask.cut(v, mask.block_k)
    out = q_tiles.new_zeros(*q_tiles.shape[:-1], v.shape[-1])  # [B * Hq, Mq, height, Dv]
    maximum, total = q_tiles.new_zeros(q_tiles.shape[:-1]), q_tiles.new_zeros(q_tiles.shape[:-1])
    for part in mask.parts():
        scores, _, keys = mask.products(part, q_tiles, k_tiles, scale)
        if changes is not None:
            scores = changes.changed(scores, mask.place(part))
        scores = mask.of_live(part, scores)
        highest = scores.amax(-1)  # [n, R, height]
        empty = highest == -torch.inf
        sink = mask.sink(part, changes)
        if sink is not None:
            highest = torch.maximum(highest, sink)
        # For a query without keys the maximum is -inf, and -inf - -inf is NaN; 0 gives exp(-inf) = 0.
        highest = highest.masked_fill(empty, 0.0)
        weights = torch.exp(scores - highest.unsqueeze(-1))
        where = part.heads[:, None], part.rows[None, :]
        maximum[where], total[where] = highest, weights.sum(-1)
        if sink is not None:
            total[where] += torch.exp(sink - highest).masked_fill(empty, 0.0)
        if dropout is not None:
            weights *= mask.kept(part, dropout)
        out[where] = _product(weights, mask.gather(v_tiles, keys, part.cols)) / _or_one(total[where]).unsqueeze(-1)
    lse = empty_lse(q).copy_(mask.join(maximum + torch.log(total), q))
    kept = _empty_kept(q)
    kept[0], kept[1] = mask.join(maximum, q), mask.join(total, q)
    return empty_out(q, v).copy_(mask.join(out, q)), lse, kept


@_as_given
def _backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem, changes: Scores | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    q, k, v, out, lse, kept = saved
    # Gradients of the tensors of score modifications are summed in at least fp32.
    given, dtype = [] if changes is None else changes.tensors(), torch.promote_types(q.dtype, torch.float32)
    learned = [
        torch.zeros(x.shape, dtype=torch.promote_types(dtype, x.dtype), device=x.device) if wants else None
        for x, wants in zip(given, wanted, strict=True)
    ]
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), learned
    mask, scale, dropout = Tiles(q, k, problem), problem.scale, problem.dropout
    q_tiles, k_tiles = mask.cut(q, mask.height, last=True), mask.cut(k, mask.block_k, last=True)
    v_tiles = mask.cut(v, mask.block_k)
    dout_tiles = mask.cut(dout, mask.height)
    # A query without keys has weights 0, whatever its dlse, which may be NaN.
    dlse = torch.zeros_like(lse) if dlse is None else dlse.masked_fill(lse == -torch.inf, 0.0)
    # Any finite estimate of delta will do; half precision may have rounded out to infinity.
    estimate = torch.linalg.vecdot(dout.to(mask.dtype), out.to(mask.dtype)).nan_to_num(0.0, 0.0, 0.0)
    of_queries = mask.cut(torch.stack([*kept, dlse, estimate], -1), mask.height).unsqueeze(-1)  # type: ignore[misc]
    dq, dk, dv = torch.zeros_like(q_tiles), torch.zeros_like(k_tiles), torch.zeros_like(v_tiles)
    for part in mask.parts():
        scores, queries, keys = mask.products(part, q_tiles, k_tiles, scale)
        steps: list[Tensor] = []
        if changes is not None:
            steps = changes.steps(scores, mask.place(part))
            scores = steps[-1].clone()
        scores = mask.of_live(part, scores)
        where = part.heads[:, None], part.rows[None, :]
        maximum, total, dlse, estimate = of_queries[where].unbind(-2)  # [n, R, height, 1]
        weights = torch.exp(scores - maximum)  # [n, R, height, c * block_k]
        weights /= _or_one(total)
        dout_rows = dout_tiles[where]
        dweights = dout_rows @ mask.gather(v_tiles, keys, part.cols).transpose(-1, -2)
        passed = weights
        if dropout is not None:
            kept_weights = mask.kept(part, dropout)
            dweights *= kept_weights
            passed = weights * kept_weights
        # The rounded weights do not quite sum to 1, which matters where one key has nearly all the weight, because
        # its dweights and delta nearly cancel. So the estimate is subtracted first and only the rest is summed, as in
        # the kernels.
        dweights -= estimate
        rest = (weights * dweights).sum(-1, keepdim=True)
        sink_weights = mask.sink_weights(part, changes, maximum, total)
        if sink_weights is not None:
            rest -= sink_weights * estimate  # a sink has no value, so its dweights are 0
        # dlse is added last: if one key has all the weight, the other terms cancel exactly.
        dscores = dweights.sub_(rest).add_(dlse).mul_(weights)
        if changes is not None:
            dscores = changes.gradient(dscores, steps, mask.place(part), learned)
        dscores = dscores * scale
        dq[where] = _product(dscores, mask.gather(k_tiles, keys, part.cols))
        mask.scatter_add(dv, keys, part.cols, _product(passed.transpose(-1, -2), dout_rows))
        mask.scatter_add(dk, keys, part.cols, _product(dscores.transpose(-1, -2), queries))
        if sink_weights is not None:
            mask.add_sinks(part, learned, sink_weights, dlse - (estimate + rest))
    return (
        empty_gradient(q).copy_(mask.join(dq, q)),
        empty_gradient(k).copy_(mask.join(dk, k)),
        empty_gradient(v).copy_(mask.join(dv, v)),
        learned,
    )


def _empty_kept(q: Tensor) -> Tensor:
    return q.new_empty((2, *q.shape[:-1]), dtype=torch.promote_types(q.dtype, torch.float32))


attention = Operator("blockwise", _forward, _backward, _empty_kept)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A single column is summed separately, because BLAS sums it term by term, with larger errors."""
    return a @ b if b.shape[-1] > 1 else (a * b.mT).sum(-1, keepdim=True)


def _or_one(total: Tensor) -> Tensor:
    """Replaces sums of 0, of queries without keys, by 1."""
    return total.masked_fill(total == 0, 1.0)

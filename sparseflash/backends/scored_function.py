"""Attention with a function among the changes of scores, which no registered operator can take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseflash.backends.problem import Problem
from sparseflash.scores.change import Scores

if TYPE_CHECKING:
    from sparseflash.backends.scored import ScoredOperator


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    operator: ScoredOperator, q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of an operator, differentiable; torch.compile breaks the graph here."""
    out, lse = _Direct.apply(operator, problem, changes, q, k, v, *changes.tensors())  # type: ignore[no-untyped-call]
    return out, lse


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, operator: ScoredOperator, problem: Problem, changes: Scores, q: Tensor, k: Tensor, v: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse, kept = operator.run(q, k, v, problem, changes)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, kept, *tensors)
        ctx.operator, ctx.problem, ctx.changes = operator, problem, changes.with_tensors([None] * len(tensors))  # type: ignore[list-item]
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, kept, *tensors = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (6 + len(tensors))
        dout = torch.zeros_like(out) if dout is None else dout
        wanted = list(ctx.needs_input_grad[6:])
        dq, dk, dv, learned = ctx.operator.gradients(
            dout, dlse, q, k, v, out, lse, kept, ctx.changes.with_tensors(tensors), wanted, ctx.problem
        )
        found = [x if wants else None for x, wants in zip(learned, wanted, strict=True)]
        return None, None, None, dq, dk, dv, *found

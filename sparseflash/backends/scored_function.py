"""Attention with a function among the changes of scores, which no registered operator can take, in compiled code."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    return operator.past_the_operator(q, k, v, problem, changes)

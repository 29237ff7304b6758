"""Attention with `scores.function` in compiled code: a registered operator cannot take a Python function."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseflash.backends.problem import Problem
from sparseflash.backends.refused_derivatives import refuse_recording
from sparseflash.scores.change import Scores

if TYPE_CHECKING:
    from sparseflash.backends.operators import Operator


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="scores.function is a Python function, which no operator of PyTorch takes. Compile without fullgraph=True, "
    "or use another change of sparseflash.scores, or backend='reference', which is traced."
)
def attention(
    operator: Operator, q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of an operator, differentiable; torch.compile breaks the graph here."""
    refuse_recording(operator.name)
    return operator.past_the_operator(q, k, v, problem, changes)

"""Flop formulas of our operators for PyTorch's `FlopCounterMode`: the products over live tiles, as in `analysis.flops`.

The counter counts 0 for operators that it does not have. Importing `torch.utils.flop_counter` takes a third of a
second, so ours are registered at the first call under a counter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparseflash.backends.problem import Problem
from sparseflash.blockmask.arguments import have_contents

Formula = Callable[..., int]


def tell(*operators: tuple[Any, Formula]) -> None:
    """Registers flop formulas of operators (`torch.ops.x.y`) with PyTorch's counter and with all active counters."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:  # not imported, so nothing counts
        return
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    counting = [
        getattr(getattr(mode, "counter", mode), "flop_registry", None) for mode in _get_current_dispatch_mode_stack()
    ]
    for operator, formula in operators:
        if operator not in module.flop_registry:
            module.register_flop_formula(operator, get_raw=True)(formula)
        for registry in counting:
            if isinstance(registry, dict):
                registry.setdefault(operator, formula)


def forward_flops(q: Tensor, k: Tensor, v: Tensor, *problem: Any, out_val: Any = None) -> int:
    """The flops of a forward: two products over the scores of the live tiles."""
    return 2 * scores(q, k, Problem(*problem)) * (q.shape[-1] + v.shape[-1])


def backward_flops(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensor,
    *problem: Any, out_val: Any = None,
) -> int:  # fmt: skip
    """The flops of a backward: five products; one recomputes the scores. PyTorch counts five for its own attention."""
    return 2 * scores(q, k, Problem(*problem)) * (3 * q.shape[-1] + 2 * v.shape[-1])


def with_more(formula: Formula, first: int, count: int) -> Formula:
    """The formula for an operator that takes `count` more arguments after the first `first` ones."""
    return lambda *arguments, out_val=None: formula(*arguments[:first], *arguments[first + count :])


def scores(q: Tensor, k: Tensor, problem: Problem) -> int:
    """Tiles past `lengths` are counted, too.

    Fake tensors count as the mean over the patterns, a dynamic mask with its full capacity.
    """
    (batch, heads, q_len), k_len = q.shape[:3], k.shape[2]
    indptr, indices, pattern, block_q, block_k = (
        problem.indptr, problem.indices, problem.pattern, problem.block_q, problem.block_k
    )  # fmt: skip
    if indptr is None or indices is None or pattern is None:
        return batch * heads * q_len * k_len
    rows = -(-q_len // block_q)
    if not have_contents(q, indptr):
        return batch * heads * indices.shape[0] * block_q * block_k * rows // max(1, indptr.shape[0] - 1)
    tiles = indptr[rows::rows].long() - indptr[:-1:rows].long()  # per pattern
    own_batch, own_heads = pattern.shape
    walked = int(tiles[pattern.long()].sum()) * (batch // own_batch) * (heads // own_heads)
    return walked * block_q * block_k

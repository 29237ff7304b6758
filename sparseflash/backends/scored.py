"""Makes a backend with changed scores callable: as a registered operator, whose gradients include the learned tensors.

It stands beside `registration.py`, whose calls without changes take no notice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends import flop_counter
from sparseflash.backends.problem import Problem, schema
from sparseflash.backends.registration import (
    LIBRARY,
    define,
    empty_gradient,
    empty_lse,
    empty_out,
    refuse_second_gradients,
    refuse_transforms,
)
from sparseflash.scores.change import Scores
from sparseflash.scores.parts import put_together

_PROBLEM = len(Problem._fields)


class ScoredOperator:
    """A backend as the operator `sparseflash::{name}_scored`, which takes the tensors of the changes, too."""

    def __init__(
        self, name: str, forward: Callable[..., Any], backward: Callable[..., Any],
        empty_kept: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        """`forward(q, k, v, problem, changes)` and `empty_kept` are as in `registration.Operator`.

        `backward(dout, dlse, q, k, v, out, lse, kept, changes, wanted, problem)` returns dq, dk, dv and a gradient for
        each tensor of the changes, None where `wanted` is False.
        """
        self.name, self._forward, self._backward, self._empty_kept = name, forward, backward, empty_kept
        inputs, changes = "Tensor q, Tensor k, Tensor v", "Tensor[] tensors, str changes"
        # PyTorch drops arguments that are equal to their defaults, and with a list among the inputs it then expects as
        # many gradients as it has kept.
        problem = schema(with_defaults=False)
        self._packets = (
            define(
                f"{name}_scored", f"({inputs}, {changes}, {problem}) -> (Tensor, Tensor, Tensor)", self._run_forward,
                self._fake_forward,
            ),
            define(
                f"{name}_scored_backward",
                f"(Tensor dout, Tensor? dlse, {inputs}, Tensor out, Tensor lse, Tensor kept, {changes}, bool[] wanted, "
                f"{problem}) -> (Tensor, Tensor, Tensor, Tensor[])",
                self._run_backward, _fake_backward,
            ),
        )  # fmt: skip
        self._forward_op, self._backward_op = (packet.default for packet in self._packets)
        torch.library.register_autograd(
            f"sparseflash::{name}_scored", self._differentiate, setup_context=_save, lib=LIBRARY
        )
        torch.library.register_autograd(
            f"sparseflash::{name}_scored_backward", refuse_second_gradients(name), lib=LIBRARY
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores) -> tuple[Tensor, Tensor]:
        """`(out, lse)`, differentiable. changes: prepared for these tensors."""
        refuse_transforms(self.name, q, k, v, *changes.tensors())
        if changes.find("function") is not None:
            from sparseflash.backends import scored_function  # imported late: it needs Dynamo, which takes a second

            out, lse = scored_function.attention(self, q, k, v, problem, changes)
            return out, lse
        self._let_count()
        out, lse, _ = self._forward_op(q, k, v, changes.tensors(), changes.described(), *problem)
        return out, lse

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], changes: str, *problem: Any) -> Any:
        return self._forward(q, k, v, Problem(*problem), put_together(changes, tensors))

    def _run_backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        kept: Tensor, tensors: list[Tensor], changes: str, wanted: list[bool], *problem: Any,
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
        together = put_together(changes, tensors)
        return self.gradients(dout, dlse, q, k, v, out, lse, kept, together, wanted, Problem(*problem))

    def gradients(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        kept: Tensor, changes: Scores, wanted: Sequence[bool], problem: Problem,
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
        """dq, dk, dv and those of the tensors, in their dtypes; empty ones where none is wanted."""
        dq, dk, dv, learned = self._backward(dout, dlse, q, k, v, out, lse, kept, changes, wanted, problem)
        tensors = changes.tensors()
        return dq, dk, dv, [
            x.new_empty(0) if found is None else found.to(x.dtype) for x, found in zip(tensors, learned, strict=True)
        ]  # fmt: skip

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores) -> Any:
        """`(out, lse, kept)`, not differentiable."""
        return self._forward(q, k, v, problem, changes)

    def _fake_forward(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], changes: str, *problem: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return empty_out(q, v), empty_lse(q), self._empty_kept(q)

    def _let_count(self) -> None:
        if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0:
            forward, backward = self._packets
            flop_counter.tell((forward, _forward_flops), (backward, _backward_flops))

    def _differentiate(
        self, ctx: Any, dout: Tensor | None, dlse: Tensor | None, dkept: Tensor | None
    ) -> tuple[Any, ...]:
        nothing = (None,) * (1 + _PROBLEM)
        if dout is None and dlse is None:
            return None, None, None, [None] * ctx.count, *nothing
        q, k, v, out, lse, kept, seed, *tensors = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        self._let_count()  # a counter may have been entered after the forward
        dq, dk, dv, learned = self._backward_op(
            dout, dlse, q, k, v, out, lse, kept, tensors, ctx.changes, ctx.wanted, *ctx.problem._replace(seed=seed)
        )
        gradients = [x if wants else None for x, wants in zip(learned, ctx.wanted, strict=True)]
        return dq, dk, dv, gradients, *nothing


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, tensors, changes, *fields = inputs
    problem = Problem(*fields)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(q, k, v, *output, problem.seed, *tensors)
    ctx.changes, ctx.count, ctx.wanted = changes, len(tensors), [x.requires_grad for x in tensors]
    ctx.problem = problem._replace(seed=None)  # see registration.py


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensor,
    tensors: list[Tensor], changes: str, wanted: list[bool], *problem: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    learned = [x.new_empty(x.shape if wants else 0) for x, wants in zip(tensors, wanted, strict=True)]
    return empty_gradient(q), empty_gradient(k), empty_gradient(v), learned


def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, tensors: Any, changes: str, *problem: Any, out_val: Any = None
) -> int:
    return flop_counter.forward_flops(q, k, v, *problem)


def _backward_flops(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensor,
    tensors: Any, changes: str, wanted: Any, *problem: Any, out_val: Any = None,
) -> int:  # fmt: skip
    return flop_counter.backward_flops(dout, dlse, q, k, v, out, lse, kept, *problem)

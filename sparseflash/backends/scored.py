"""Makes a backend with score modifications callable, with gradients of their learned tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.direct import call_directly, differentiably, is_plain_call
from sparseflash.backends.problem import Problem, schema
from sparseflash.backends.refused_derivatives import (
    no_second_gradients,
    refuse_batched_gradients,
    refuse_functional_gradients,
    refuse_tangents,
    refuse_vmap,
)
from sparseflash.backends.registration import RegisteredOperator, empty_gradient
from sparseflash.backends.saved import Saved
from sparseflash.blockmask.arguments import have_contents
from sparseflash.first_derivatives import first_derivatives
from sparseflash.scores.change import Scores, put_together

_SAVED = len(Saved._fields)


class ScoredOperator(RegisteredOperator):
    """A backend, called directly if the call is plain, and as the operator `sparseflash::{name}_scored` otherwise."""

    def __init__(
        self, name: str, forward: Callable[..., Any], backward: Callable[..., Any],
        empty_kept: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        """`forward(q, k, v, problem, changes)` and `empty_kept` are as in `registration.Operator`.

        `backward(dout, dlse, saved, changes, wanted, problem)` returns dq, dk, dv and a list with the gradient of each
        tensor of the score modifications, None where `wanted` is False.
        """
        self.forward, self._direct_backward = forward, backward
        changes = "Tensor[] tensors", "str changes"
        # No defaults: PyTorch drops arguments that equal theirs, and with a list among the inputs it then expects
        # only as many gradients as arguments are left.
        super().__init__(
            name, f"{name}_scored", empty_kept, problem=schema(with_defaults=False), added=changes,
            added_backward=["bool[] wanted"], added_gradients=["Tensor[]"],
        )  # fmt: skip

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores) -> tuple[Tensor, Tensor]:
        """`(out, lse)`, differentiable. changes: the score modifications, prepared for these tensors."""
        tensors = changes.tensors()
        if is_plain_call(q, k, v, *tensors):
            run = Run(self, problem, changes, [x.requires_grad for x in tensors])
            return call_directly(run, q, k, v, *tensors)
        refuse_functional_gradients(self.name)
        has_function = changes.find("function") is not None
        refuse_vmap(self.name, q, k, v, *tensors, around=has_function)
        if has_function:
            from sparseflash.backends import scored_function  # imported late: it needs Dynamo, which takes a second

            out, lse = scored_function.attention(self, q, k, v, problem, changes)
            return out, lse
        return self._forward(q, k, v, tensors, changes.described(), *problem)

    def past_the_operator(
        self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores
    ) -> tuple[Tensor, Tensor]:
        """`(out, lse)`, differentiable, without a registered operator."""
        tensors = changes.tensors()
        refuse_tangents(self.name, q, k, v, *tensors)
        run = Run if have_contents(q) else _Shapes
        wanted = [x.requires_grad for x in tensors]
        return differentiably(run(self, problem, changes, wanted), q, k, v, *tensors)

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        tensors, changes, *problem = others
        out, lse, kept = self.forward(q, k, v, Problem(*problem), put_together(changes, tensors))
        return out, lse, kept

    def _run_backward(
        self, dout: Tensor, dlse: Tensor | None, *others: Any
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        saved, (tensors, changes, wanted, *problem) = Saved(*others[:_SAVED]), others[_SAVED:]
        together = put_together(changes, tensors)
        dq, dk, dv, *learned = self.direct_backward(dout, dlse, saved, together, wanted, Problem(*problem))
        # Contiguous, as in `_fake_backward`; kernels may pad rows.
        given = [x.new_empty(0) if g is None else g.contiguous() for x, g in zip(tensors, learned, strict=True)]
        return dq, dk, dv, given

    def _fake_backward(
        self, dout: Tensor, dlse: Tensor | None, *others: Any
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        (q, k, v, *_), (tensors, _, wanted, *_) = others[:_SAVED], others[_SAVED:]
        learned = [x.new_empty(x.shape if wants else 0) for x, wants in zip(tensors, wanted, strict=True)]
        return empty_gradient(q), empty_gradient(k), empty_gradient(v), learned

    def direct_backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, changes: Scores, wanted: Sequence[bool], problem: Problem
    ) -> tuple[Any, ...]:
        """`(dq, dk, dv, *gradients of the tensors)`, in the tensors' dtypes; None where `wanted` is False."""
        dq, dk, dv, learned = self._direct_backward(dout, dlse, saved, changes, wanted, problem)
        return dq, dk, dv, *in_dtypes_of(changes.tensors(), learned)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, tensors: list[Tensor], changes: str, wanted: list[bool],
        problem: Problem,
    ) -> tuple[Any, ...]:  # fmt: skip
        refuse_batched_gradients(self.name, dout, dlse)
        dq, dk, dv, learned = self._backward(dout, dlse, saved, tensors, changes, wanted, *problem)
        return dq, dk, dv, *(x if wants else None for x, wants in zip(learned, wanted, strict=True))

    def _gradients(
        self, ctx: Any, dout: Tensor, dlse: Tensor | None, saved: Saved, tensors: list[Tensor], problem: Problem
    ) -> tuple[Tensor | None, ...]:
        (changes,) = ctx.added
        return self.backward(dout, dlse, saved, tensors, changes, ctx.wanted, problem)


class Run:
    """A backend applied to one problem with score modifications; see `direct.Differentiable`."""

    def __init__(self, operator: ScoredOperator, problem: Problem, changes: Scores, wanted: Sequence[bool]) -> None:
        self._operator, self._problem, self.seed = operator, problem, problem.seed
        self._changes, self._wanted = changes, list(wanted)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        changes = self._changes
        out, lse, kept = self._operator.forward(q, k, v, self._problem, changes)
        self._changes = changes.with_tensors([None] * len(tensors))  # type: ignore[list-item]
        return out, lse, kept

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, seed: Tensor | None, *tensors: Tensor
    ) -> tuple[Any, ...]:
        changes, problem = self._changes.with_tensors(tensors), self._problem._replace(seed=seed)
        return self._operator.direct_backward(dout, dlse, saved, changes, self._wanted, problem)

    def _backward_of(self, dout: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Any, ...]:
        return self.backward(dout, dlse, Saved(*rest[:_SAVED]), *rest[_SAVED:])

    def repeated_backward(self, dout: Tensor, saved: Sequence[Any]) -> None:
        """Nothing is prepared."""

    def operator_backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, seed: Tensor | None, *tensors: Tensor
    ) -> tuple[Any, ...]:
        if self._changes.find("function") is not None:  # the registered operator cannot take a function
            refuse_batched_gradients(self._operator.name, dout, dlse)
            refuse_tangents(self._operator.name, dout, dlse, *saved, *tensors)
            return first_derivatives(
                no_second_gradients(self._operator.name), self._backward_of, dout, dlse, *saved, seed, *tensors
            )
        changes, problem = self._changes.described(), self._problem._replace(seed=seed)
        return self._operator.backward(dout, dlse, saved, list(tensors), changes, self._wanted, problem)


class _Shapes(Run):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return self._operator._fake_forward(q, k, v)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, seed: Tensor | None, *tensors: Tensor
    ) -> tuple[Any, ...]:
        learned = [torch.empty_like(x) if wants else None for x, wants in zip(tensors, self._wanted, strict=True)]
        return empty_gradient(saved.q), empty_gradient(saved.k), empty_gradient(saved.v), *learned


def in_dtypes_of(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients in the dtypes of their tensors."""
    return [None if g is None else g.to(x.dtype) for x, g in zip(tensors, gradients, strict=True)]

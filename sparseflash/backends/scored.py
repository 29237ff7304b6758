"""Makes a backend with changed scores callable, with gradients of the learned tensors, too.

As in `registration.py`, plain calls are direct, and all others go through a registered operator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from sparseflash.backends import flop_counter
from sparseflash.backends.direct import call_directly, differentiably, have_contents, is_plain_call
from sparseflash.backends.problem import Problem, schema
from sparseflash.backends.refused_derivatives import refuse_second_gradients, refuse_transforms, refuse_vmap
from sparseflash.backends.registration import LIBRARY, define, empty_gradient, empty_lse, empty_out
from sparseflash.backends.saved import Saved
from sparseflash.backends.saved import schema as saved_schema
from sparseflash.scores.change import Scores
from sparseflash.scores.parts import put_together

_PROBLEM, _SAVED = len(Problem._fields), len(Saved._fields)


class ScoredOperator:
    """A backend, called directly if the call is plain, and as the operator `sparseflash::{name}_scored` otherwise."""

    def __init__(
        self, name: str, forward: Callable[..., Any], backward: Callable[..., Any],
        empty_kept: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        """`forward(q, k, v, problem, changes)` and `empty_kept` are as in `registration.Operator`.

        `backward(dout, dlse, saved, changes, wanted, problem)` returns dq, dk, dv and a gradient for each tensor of the
        changes, None where `wanted` is False.
        """
        self.name, self.forward, self._backward, self._empty_kept = name, forward, backward, empty_kept
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
                f"(Tensor dout, Tensor? dlse, {saved_schema()}, {changes}, bool[] wanted, {problem}) "
                "-> (Tensor, Tensor, Tensor, Tensor[])",
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
        tensors = changes.tensors()
        if is_plain_call(q, k, v, *tensors):
            return self.directly(q, k, v, problem, changes, tensors)
        refuse_transforms(self.name, q, k, v, *tensors)
        has_function = changes.find("function") is not None
        refuse_vmap(self.name, q, k, v, *tensors, around=has_function)
        if has_function:
            from sparseflash.backends import scored_function  # imported late: it needs Dynamo, which takes a second

            out, lse = scored_function.attention(self, q, k, v, problem, changes)
            return out, lse
        self._let_count()
        out, lse, _ = self._forward_op(q, k, v, tensors, changes.described(), *problem)
        return out, lse

    def with_passes(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> ScoredOperator:
        """The same operator, whose direct calls run these functions of one call; see `__init__`."""
        other = copy.copy(self)
        other.forward, other._backward = forward, backward
        return other

    def directly(
        self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """`(out, lse)`, differentiable, of a plain call. tensors: of the changes."""
        return call_directly(_Run(self, problem, changes), q, k, v, *tensors)

    def past_the_operator(
        self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores
    ) -> tuple[Tensor, Tensor]:
        """`(out, lse)`, differentiable, of a call that need not be plain."""
        operator = self if have_contents(q) else self.with_passes(self._fake_forward, _shapes_of_backward)
        return differentiably(_Run(operator, problem, changes), q, k, v, *changes.tensors())

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], changes: str, *problem: Any) -> Any:
        return self.forward(q, k, v, Problem(*problem), put_together(changes, tensors))

    def _run_backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        kept: Tensor, tensors: list[Tensor], changes: str, wanted: list[bool], *problem: Any,
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
        saved, together = Saved(q, k, v, out, lse, kept), put_together(changes, tensors)
        dq, dk, dv, *learned = self.direct_backward(dout, dlse, saved, together, wanted, Problem(*problem))
        return dq, dk, dv, [x.new_empty(0) if g is None else g for x, g in zip(tensors, learned, strict=True)]

    def direct_backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, changes: Scores, wanted: Sequence[bool], problem: Problem
    ) -> tuple[Any, ...]:
        """dq, dk, dv and those of the tensors, in their dtypes; None where none is wanted."""
        dq, dk, dv, learned = self._backward(dout, dlse, saved, changes, wanted, problem)
        tensors = changes.tensors()
        return dq, dk, dv, *(None if g is None else g.to(x.dtype) for x, g in zip(tensors, learned, strict=True))

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, tensors: list[Tensor], changes: str, wanted: list[bool],
        problem: Problem,
    ) -> tuple[Any, ...]:  # fmt: skip
        """The same through the registered operator. changes: described, without their tensors."""
        self._let_count()  # a counter may have been entered after the forward
        if saved.kept is None:
            saved = saved._replace(kept=self._empty_kept(saved.q))
        dq, dk, dv, learned = self._backward_op(dout, dlse, *saved, tensors, changes, wanted, *problem)
        return dq, dk, dv, *(x if wants else None for x, wants in zip(learned, wanted, strict=True))

    def _fake_forward(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
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
        saved, problem = Saved(q, k, v, out, lse, kept), ctx.problem._replace(seed=seed)
        dq, dk, dv, *learned = self.backward(dout, dlse, saved, tensors, ctx.changes, ctx.wanted, problem)
        return dq, dk, dv, learned, *nothing


class _Run:
    """A backend applied to one problem and changes of one kind; see `direct.Differentiable`."""

    def __init__(self, operator: ScoredOperator, problem: Problem, changes: Scores) -> None:
        self._operator, self._problem, self.seed = operator, problem, problem.seed
        self._wanted = [x.requires_grad for x in changes.tensors()]
        self._changes = changes

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

    def operator_backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, seed: Tensor | None, *tensors: Tensor
    ) -> tuple[Any, ...]:
        if self._changes.find("function") is not None:  # the registered operator takes none
            return _Once.apply(self._operator.name, self.backward, dout, dlse, *saved, seed, *tensors)  # type: ignore[no-any-return, no-untyped-call]
        changes, problem = self._changes.described(), self._problem._replace(seed=seed)
        return self._operator.backward(dout, dlse, saved, list(tensors), changes, self._wanted, problem)


class _Once(torch.autograd.Function):
    """A backward without a registered operator, whose gradients cannot be differentiated again either."""

    @staticmethod
    def forward(
        ctx: Any, name: str, backward: Callable[..., tuple[Any, ...]], dout: Tensor, dlse: Tensor | None, *rest: Any
    ) -> tuple[Any, ...]:
        ctx.name = name
        return backward(dout, dlse, Saved(*rest[:_SAVED]), *rest[_SAVED:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        refuse_second_gradients(ctx.name)(ctx, *gradients)


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


def _shapes_of_backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, changes: Scores, wanted: Sequence[bool], problem: Problem
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Empty gradients."""
    learned = [torch.empty_like(x) if wants else None for x, wants in zip(changes.tensors(), wanted, strict=True)]
    return empty_gradient(saved.q), empty_gradient(saved.k), empty_gradient(saved.v), learned


def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, tensors: Any, changes: str, *problem: Any, out_val: Any = None
) -> int:
    return flop_counter.forward_flops(q, k, v, *problem)


def _backward_flops(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensor,
    tensors: Any, changes: str, wanted: Any, *problem: Any, out_val: Any = None,
) -> int:  # fmt: skip
    return flop_counter.backward_flops(dout, dlse, q, k, v, out, lse, kept, *problem)

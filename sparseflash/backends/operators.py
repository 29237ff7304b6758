"""Makes a backend callable: directly in plain eager mode, and as registered PyTorch operators everywhere else.

A backend is a forward and a backward function of plain tensors, a `Problem` and score modifications.

PyTorch's dispatcher and the Python of its autograd registration take longer than the kernels on a short sequence. So
unless something compiles, traces, profiles or transforms the call, the backend's functions are called directly, in our
own autograd function; see `direct.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends import flop_counter
from sparseflash.backends.direct import call_directly, differentiably, is_plain_call
from sparseflash.backends.problem import Problem, schema
from sparseflash.backends.refused_derivatives import (
    no_second_gradients,
    refuse_batched_gradients,
    refuse_functional_gradients,
    refuse_tangents,
    refuse_vmap,
)
from sparseflash.backends.registration import LIBRARY, call, empty_gradient, empty_lse, empty_out, register
from sparseflash.backends.saved import Saved
from sparseflash.backends.saved import schema as saved_schema
from sparseflash.blockmask.arguments import have_contents
from sparseflash.first_derivatives import first_derivatives
from sparseflash.scores.change import Scores, put_together

_PROBLEM, _SAVED = len(Problem._fields), len(Saved._fields)
_CHANGES, _WANTED = 2, 3  # arguments of score modifications: of a forward, and of a backward


class Operator:
    """A backend, called directly if the call is plain. Otherwise as the operator `sparseflash::{name}`, or with score
    modifications `{name}_scored`, which takes their tensors as a list and describes the rest in a text.
    """

    def __init__(
        self, name: str, forward: Callable[..., Any], backward: Callable[..., Any],
        empty_kept: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        """`forward(q, k, v, problem, changes)` returns `(out, lse, kept)`. `kept` has the shape of `empty_kept(q)` and
        holds anything that the backward needs besides q, k, v, out and lse. changes: None without score modifications.

        `backward(dout, dlse, saved, problem, changes, wanted)` returns dq, dk, dv and a list with the gradient of each
        tensor of the score modifications, None where `wanted` is False; `dlse` may be None. Outputs must have the
        strides of `empty_out`, `empty_lse` and `empty_gradient`.
        """
        self.name, self.forward = name, forward
        self._compute_backward, self._empty_kept = backward, empty_kept
        # No defaults with a list among the inputs: PyTorch drops arguments that equal theirs, and then expects only as
        # many gradients as arguments are left.
        plain = self._registered(name, schema())
        scored = self._registered(
            f"{name}_scored", schema(with_defaults=False), "Tensor[] tensors, str changes, ", "bool[] wanted, ",
            ", Tensor[]",
        )  # fmt: skip
        torch.library.register_vmap(f"sparseflash::{name}", self._mapped, lib=LIBRARY)
        self._forward_op, self._backward_op = (packet.default for packet in plain)
        self._scored_forward_op, self._scored_backward_op = (packet.default for packet in scored)
        forward_flops, backward_flops = flop_counter.forward_flops, flop_counter.backward_flops
        of_scored = (
            flop_counter.with_more(forward_flops, 3, _CHANGES),
            flop_counter.with_more(backward_flops, 2 + _SAVED, _WANTED),
        )
        self._formulas: tuple[tuple[Any, flop_counter.Formula], ...] = tuple(
            zip((*plain, *scored), (forward_flops, backward_flops, *of_scored), strict=True)
        )

    def _registered(self, operator: str, problem: str, changes: str = "", wanted: str = "", learned: str = "") -> Any:
        return register(
            operator, self.name,
            (
                f"(Tensor q, Tensor k, Tensor v, {changes}{problem}) -> (Tensor, Tensor, Tensor)",
                self._run_forward, self._fake_forward,
            ),
            (
                f"(Tensor dout, Tensor? dlse, {saved_schema()}, {changes}{wanted}{problem}) -> "
                f"(Tensor, Tensor, Tensor{learned})", self._run_backward, self._fake_backward,
            ),
            self._differentiate, self._save,
        )  # fmt: skip

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores | None = None
    ) -> tuple[Tensor, Tensor]:
        """`(out, lse)`, differentiable. changes: the score modifications, prepared for these tensors."""
        tensors = [] if changes is None else changes.tensors()
        if is_plain_call(q, k, v, *tensors):
            run = Run(self, problem, changes, [x.requires_grad for x in tensors])
            return call_directly(run, q, k, v, *tensors)
        refuse_functional_gradients(self.name)
        if changes is None:
            out, lse, _ = self._dispatched(self._forward_op, (q, k, v, *problem))
            return out, lse
        has_function = changes.find("function") is not None
        refuse_vmap(self.name, q, k, v, *tensors, around=has_function)
        if has_function:
            from sparseflash.backends import scored_function  # imported late: it needs Dynamo, which takes a second

            out, lse = scored_function.attention(self, q, k, v, problem, changes)
            return out, lse
        arguments = q, k, v, tensors, changes.described(), *problem
        out, lse, _ = self._dispatched(self._scored_forward_op, arguments)
        return out, lse

    def past_the_operator(
        self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores
    ) -> tuple[Tensor, Tensor]:
        """`(out, lse)`, differentiable, without a registered operator."""
        tensors = changes.tensors()
        refuse_tangents(self.name, q, k, v, *tensors)
        run = Run if have_contents(q) else _Shapes
        wanted = [x.requires_grad for x in tensors]
        return differentiably(run(self, problem, changes, wanted), q, k, v, *tensors)

    def direct_backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem, changes: Scores | None = None,
        wanted: Sequence[bool] = (),
    ) -> tuple[Any, ...]:  # fmt: skip
        """`(dq, dk, dv, *gradients of the tensors)`, in the tensors' dtypes; None where `wanted` is False."""
        dq, dk, dv, learned = self._compute_backward(dout, dlse, saved, problem, changes, wanted)
        return dq, dk, dv, *in_dtypes_of([] if changes is None else changes.tensors(), learned)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem, tensors: Sequence[Tensor] = (),
        changes: str = "", wanted: Sequence[bool] = (),
    ) -> tuple[Any, ...]:  # fmt: skip
        """`direct_backward` through the registered operator. changes: as `Scores.described`, "" for none."""
        if saved.kept is None:
            saved = saved._replace(kept=self._empty_kept(saved.q))
        if not changes:
            gradients: tuple[Any, ...] = self._dispatched(self._backward_op, (dout, dlse, *saved, *problem))
            return gradients
        refuse_batched_gradients(self.name, dout, dlse)
        arguments = dout, dlse, *saved, list(tensors), changes, list(wanted), *problem
        dq, dk, dv, learned = self._dispatched(self._scored_backward_op, arguments)
        return dq, dk, dv, *(x if wants else None for x, wants in zip(learned, wanted, strict=True))

    def _dispatched(self, operator: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if torch.compiler.is_compiling():
            return operator(*arguments)
        if torch._C._len_torch_dispatch_stack() > 0:  # a counter may have been entered between forward and backward
            flop_counter.tell(*self._formulas)
        return call(self.name, operator, arguments)

    # The functions of both operators. The arguments of score modifications, if any, stand before the problem's.

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        added, problem = _apart(others, _CHANGES)
        out, lse, kept = self.forward(q, k, v, problem, _together(added))
        return out, lse, kept

    def _fake_forward(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        return empty_out(q, v), empty_lse(q), self._empty_kept(q)

    def _run_backward(self, dout: Tensor, dlse: Tensor | None, *others: Any) -> tuple[Any, ...]:
        saved, (added, problem) = Saved(*others[:_SAVED]), _apart(others[_SAVED:], _WANTED)
        found = self.direct_backward(dout, dlse, saved, problem, _together(added), *added[_CHANGES:])
        if not added:
            return found
        # Contiguous, as in `_fake_backward`; kernels may pad rows.
        learned = [x.new_empty(0) if g is None else g.contiguous() for x, g in zip(added[0], found[3:], strict=True)]
        return *found[:3], learned

    def _fake_backward(self, dout: Tensor, dlse: Tensor | None, *others: Any) -> tuple[Any, ...]:
        found = tuple(map(empty_gradient, others[:3]))
        added, _ = _apart(others[_SAVED:], _WANTED)
        if not added:
            return found
        tensors, _, wanted = added
        return *found, [x.new_empty(x.shape if wants else 0) for x, wants in zip(tensors, wanted, strict=True)]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        added, problem = _apart(inputs[3:], _CHANGES)
        tensors, ctx.changes = added or ([], "")
        ctx.wanted = [x.requires_grad for x in tensors]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*inputs[:3], *output, problem.seed, *tensors)
        # The mask's arrays are attributes, not saved by save_for_backward: plans are cached on them, and copies made
        # by hooks for saved tensors would lose the plans. And autograd cannot save masks made under inference_mode().
        ctx.problem = problem._replace(seed=None)

    def _differentiate(
        self, ctx: Any, dout: Tensor | None, dlse: Tensor | None, dkept: Tensor | None
    ) -> tuple[Any, ...]:
        gradients: tuple[Tensor | None, ...] = (None,) * (3 + len(ctx.wanted))
        if dout is not None or dlse is not None:
            # Unpacked only once: checkpointing's hooks allow no more.
            q, k, v, out, lse, kept, seed, *tensors = ctx.saved_tensors
            dout = torch.zeros_like(out) if dout is None else dout
            saved, problem = Saved(q, k, v, out, lse, kept), ctx.problem._replace(seed=seed)
            gradients = self.backward(dout, dlse, saved, problem, tensors, ctx.changes, ctx.wanted)
        dq, dk, dv, *learned = gradients
        return dq, dk, dv, *((learned, None) if ctx.changes else ()), *(None,) * _PROBLEM

    def _mapped(self, info: Any, dims: Sequence[int | None], *arguments: Any) -> tuple[tuple[Tensor, ...], Any]:
        """The mapped dimension is folded into the batch; the slices run one after another with a pattern per batch
        element, with dropout, or if more than q, k and v is mapped.
        """
        tensors, problem, size = arguments[:3], Problem(*arguments[3:]), info.batch_size
        own_patterns = problem.pattern is not None and len(problem.pattern) > 1
        if own_patterns or problem.seed is not None or any(dim is not None for dim in dims[3:]):
            rows = [[x if dim is None else x.select(dim, i) for x, dim in zip(arguments, dims)] for i in range(size)]
            return tuple(map(torch.stack, zip(*(self._forward_op(*row) for row in rows)))), (0, 0, 0)
        if problem.lengths is not None:
            problem = problem._replace(lengths=problem.lengths.repeat(1, size))
        several = (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in zip(tensors, dims))
        out, lse, kept = self._forward_op(*(x.flatten(0, 1) for x in several), *problem)
        return (out.unflatten(0, (size, -1)), lse.unflatten(0, (size, -1)), kept), (0, 0, None)


def _apart(others: Sequence[Any], count: int) -> tuple[tuple[Any, ...], Problem]:
    """The arguments of score modifications, `count` if the first is a list and otherwise none; and the problem."""
    count = count if isinstance(others[0], list | tuple) else 0
    return tuple(others[:count]), Problem(*others[count:])


def _together(added: tuple[Any, ...]) -> Scores | None:
    return put_together(added[1], added[0]) if added else None


class Run:
    """A backend applied to one problem; see `direct.Differentiable`."""

    def __init__(
        self, operator: Operator, problem: Problem, changes: Scores | None, wanted: Sequence[bool]
    ) -> None:  # fmt: skip
        self._operator, self._problem, self.seed = operator, problem, problem.seed
        self._changes, self._wanted = changes, wanted

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        changes = self._changes
        out, lse, kept = self._operator.forward(q, k, v, self._problem, changes)
        if changes is not None:
            self._changes = changes.with_tensors([None] * len(tensors))  # type: ignore[list-item]
        return out, lse, kept

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, seed: Tensor | None, *tensors: Tensor
    ) -> tuple[Any, ...]:
        changes = None if self._changes is None else self._changes.with_tensors(tensors)
        problem = self._problem._replace(seed=seed)
        return self._operator.direct_backward(dout, dlse, saved, problem, changes, self._wanted)

    def _backward_of(self, dout: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Any, ...]:
        return self.backward(dout, dlse, Saved(*rest[:_SAVED]), *rest[_SAVED:])

    def repeated_backward(self, dout: Tensor, saved: Sequence[Any]) -> None:
        """Nothing is prepared."""

    def operator_backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, seed: Tensor | None, *tensors: Tensor
    ) -> tuple[Any, ...]:
        changes, problem = self._changes, self._problem._replace(seed=seed)
        if changes is not None and changes.find("function") is not None:  # no registered operator can take a function
            refuse_batched_gradients(self._operator.name, dout, dlse)
            refuse_tangents(self._operator.name, dout, dlse, *saved, *tensors)
            return first_derivatives(
                no_second_gradients(self._operator.name), self._backward_of, dout, dlse, *saved, seed, *tensors
            )
        described = "" if changes is None else changes.described()
        return self._operator.backward(dout, dlse, saved, problem, tensors, described, self._wanted)


class _Shapes(Run):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return self._operator._fake_forward(q, k, v)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, seed: Tensor | None, *tensors: Tensor
    ) -> tuple[Any, ...]:
        learned = [torch.empty_like(x) if wants else None for x, wants in zip(tensors, self._wanted, strict=True)]
        return *map(empty_gradient, saved[:3]), *learned


def in_dtypes_of(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients in the dtypes of their tensors."""
    return [None if g is None else g.to(x.dtype) for x, g in zip(tensors, gradients, strict=True)]

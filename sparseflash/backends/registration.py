"""Makes a backend callable: directly in plain eager mode, and as a registered PyTorch operator everywhere else.

A backend is a forward and a backward function of plain tensors and a `Problem`.

PyTorch's dispatcher and the Python of its autograd registration take longer than the kernels on a short sequence. So
unless something compiles, traces, profiles or transforms the call, the backend's functions are called directly, in our
own autograd function; see `direct.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from sparseflash.backends import flop_counter
from sparseflash.backends.direct import call_directly, is_plain_call
from sparseflash.backends.problem import Problem, schema
from sparseflash.backends.refused_derivatives import (
    asked,
    refuse_functional_gradients,
    refuse_second_gradients,
    refuse_tangents,
    refuse_unasked,
)
from sparseflash.backends.saved import Saved
from sparseflash.backends.saved import schema as saved_schema
from sparseflash.limits import FAR, is_near

# `torch.library.custom_op` checks at run time what opcheck checks in the tests.
LIBRARY = torch.library.Library("sparseflash", "DEF")

# cudagraph_unsafe makes torch.compile(mode="reduce-overhead") leave the operator out of its CUDA graphs: the plan
# that the first call caches would lie in the graph's memory pool. Old PyTorch lacks the tag.
_TAGS = tuple(getattr(torch.Tag, tag) for tag in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, tag))

_PROBLEM, _SAVED = len(Problem._fields), len(Saved._fields)


class RegisteredOperator(ABC):
    """The operators `sparseflash::{operator}` and `{operator}_backward` of a backend; the base class of `Operator` and
    `scored.ScoredOperator`.
    """

    def __init__(
        self, name: str, operator: str, empty_kept: Callable[[Tensor], Tensor], *, problem: str,
        added: Sequence[str] = (), added_backward: Sequence[str] = (), added_gradients: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """added: arguments of both. If not empty, the first is a list of tensors, and the backward returns a list of
        their gradients. added_backward: of the backward alone, after `added`.
        """
        self.name, self._empty_kept, self._added = name, empty_kept, len(added)
        inputs = ", ".join(("Tensor q, Tensor k, Tensor v", *added, problem))
        of_backward = ", ".join(("Tensor dout, Tensor? dlse", saved_schema(), *added, *added_backward, problem))
        gradients = ", ".join(("Tensor, Tensor, Tensor", *added_gradients))
        self._packets = register(
            operator, name, (f"({inputs}) -> (Tensor, Tensor, Tensor)", self._run_forward, self._fake_forward),
            (f"({of_backward}) -> ({gradients})", self._run_backward, self._fake_backward),
            self._differentiate, self._save,
        )  # fmt: skip
        self._forward_op, self._backward_op = (packet.default for packet in self._packets)
        self._formulas = (
            flop_counter.with_more(flop_counter.forward_flops, 3, len(added)),
            flop_counter.with_more(flop_counter.backward_flops, 2 + _SAVED, len(added) + len(added_backward)),
        )

    @abstractmethod
    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        """`(out, lse, kept)` of the operator's arguments."""

    @abstractmethod
    def _run_backward(self, dout: Tensor, dlse: Tensor | None, *others: Any) -> tuple[Any, ...]:
        """`(dq, dk, dv, *lists of gradients)` of the backward operator's arguments."""

    @abstractmethod
    def _fake_backward(self, dout: Tensor, dlse: Tensor | None, *others: Any) -> tuple[Any, ...]:
        """Empty tensors with the shapes and strides of the results of `_run_backward`."""

    @abstractmethod
    def _gradients(
        self, ctx: Any, dout: Tensor, dlse: Tensor | None, saved: Saved, tensors: list[Tensor], problem: Problem
    ) -> tuple[Tensor | None, ...]:
        """`(dq, dk, dv, *gradients of tensors)` through the registered operator; `ctx` as `_save` leaves it."""

    def _fake_forward(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        return empty_out(q, v), empty_lse(q), self._empty_kept(q)

    def _forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse, _ = self._dispatched(self._forward_op, arguments)
        return out, lse

    def _backward(self, dout: Tensor, dlse: Tensor | None, saved: Saved, *others: Any) -> tuple[Any, ...]:
        if saved.kept is None:
            saved = saved._replace(kept=self._empty_kept(saved.q))
        gradients: tuple[Any, ...] = self._dispatched(self._backward_op, (dout, dlse, *saved, *others))
        return gradients

    def _dispatched(self, operator: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if torch.compiler.is_compiling():
            return operator(*arguments)
        if torch._C._len_torch_dispatch_stack() > 0:  # a counter may have been entered between forward and backward
            flop_counter.tell(*zip(self._packets, self._formulas, strict=True))
        return call(self.name, operator, arguments)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        q, k, v, *others = inputs
        added, problem = others[: self._added], Problem(*others[self._added :])
        tensors, *ctx.added = added or [[]]
        ctx.wanted = [x.requires_grad for x in tensors]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(q, k, v, *output, problem.seed, *tensors)
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
            gradients = self._gradients(ctx, dout, dlse, saved, tensors, problem)
        dq, dk, dv, *learned = gradients
        lists = (learned,) if self._added else ()
        return dq, dk, dv, *lists, *(None,) * (len(ctx.added) + _PROBLEM)


class Operator(RegisteredOperator):
    """A backend, called directly if the call is plain, and as the operator `sparseflash::{name}` otherwise."""

    def __init__(
        self, name: str, forward: Callable[..., Any], backward: Callable[..., Any],
        empty_kept: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        """`forward(q, k, v, problem)` returns `(out, lse, kept)`. `kept` has the shape of `empty_kept(q)` and holds
        anything that the backward needs besides q, k, v, out and lse.

        `backward(dout, dlse, saved, problem)` returns `(dq, dk, dv)`; `dlse` may be None. Outputs must have the strides
        of `empty_out`, `empty_lse` and `empty_gradient`.
        """
        self.forward, self.direct_backward = forward, backward
        super().__init__(name, name, empty_kept, problem=schema())
        torch.library.register_vmap(f"sparseflash::{name}", self._mapped, lib=LIBRARY)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        """`(out, lse)`, differentiable."""
        if is_plain_call(q, k, v):
            return call_directly(_Run(self, problem), q, k, v)
        refuse_functional_gradients(self.name)
        return self._forward(q, k, v, *problem)

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

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = self._backward(dout, dlse, saved, *problem)
        return dq, dk, dv

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, *problem: Any) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, kept = self.forward(q, k, v, Problem(*problem))
        return out, lse, kept

    def _run_backward(self, dout: Tensor, dlse: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = self.direct_backward(dout, dlse, Saved(*others[:_SAVED]), Problem(*others[_SAVED:]))
        return dq, dk, dv

    def _fake_backward(self, dout: Tensor, dlse: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *_ = others
        return empty_gradient(q), empty_gradient(k), empty_gradient(v)

    def _gradients(
        self, ctx: Any, dout: Tensor, dlse: Tensor | None, saved: Saved, tensors: list[Tensor], problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.backward(dout, dlse, saved, problem)


class _Run:
    def __init__(self, operator: Operator, problem: Problem) -> None:
        self._operator, self._problem, self.seed = operator, problem, problem.seed

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        out, lse, kept = self._operator.forward(q, k, v, self._problem)
        return out, lse, kept

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, seed: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = self._operator.direct_backward(dout, dlse, saved, self._problem._replace(seed=seed))
        return dq, dk, dv

    def repeated_backward(self, dout: Tensor, saved: Sequence[Any]) -> None:
        """Nothing is prepared."""

    def operator_backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, seed: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._operator.backward(dout, dlse, saved, self._problem._replace(seed=seed))


def register(
    operator: str, name: str, forward: tuple[str, Callable[..., Any], Callable[..., Any]],
    backward: tuple[str, Callable[..., Any], Callable[..., Any]], differentiate: Callable[..., Any],
    save: Callable[..., Any],
) -> tuple[Any, Any]:  # fmt: skip
    """Registers an operator of the backend `name` and its `{operator}_backward`: returns their `OpOverloadPacket`s.

    forward, backward: schema, function and fake function of each. differentiate, save: as for
    `torch.library.register_autograd`.
    """

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def function_or_refusal(*arguments: Any) -> Any:
            refuse_unasked(name)
            return function(*arguments)

        return function_or_refusal

    def defined(operator: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
        LIBRARY.define(operator + schema, tags=_TAGS)
        LIBRARY.impl(operator, guarded(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"sparseflash::{operator}", guarded(fake), lib=LIBRARY)
        return getattr(torch.ops.sparseflash, operator)

    packets = defined(operator, *forward), defined(f"{operator}_backward", *backward)
    torch.library.register_autograd(f"sparseflash::{operator}", differentiate, setup_context=save, lib=LIBRARY)
    # Without this PyTorch would treat the gradients as constants, with no more than a warning.
    torch.library.register_autograd(f"sparseflash::{operator}_backward", refuse_second_gradients(name), lib=LIBRARY)
    return packets


def call(name: str, operator: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Calls an operator of the backend `name`. Refuses arguments with tangents."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return operator(*arguments)
    refuse_tangents(name, *(x for x in tree_leaves(arguments) if isinstance(x, Tensor)))
    asked.tangents = True
    try:
        return operator(*arguments)
    finally:
        asked.tangents = False


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """An empty tensor `[B, Hq, Nq, Dv]` in the layout of `q`, `[B, N, H, D]` in memory if q is, so that merging heads
    needs no copy.

    Contiguous if the token stride would overflow the kernels' 32-bit offsets.
    """
    batch, heads, q_len, _ = q.shape
    if heads > 1 and q_len > 1 and q.stride(1) < q.stride(2) and heads * v.shape[-1] < FAR:
        return q.new_empty(batch, q_len, heads, v.shape[-1]).transpose(1, 2)
    return q.new_empty(batch, heads, q_len, v.shape[-1])


def empty_gradient(x: Tensor) -> Tensor:
    """An empty tensor in the layout of `x`; contiguous if `x` overlaps itself and tokens would become the innermost
    dimension, or if the token stride would overflow 32-bit offsets."""
    gradient = torch.empty_like(x)
    return gradient if is_near(gradient) else x.new_empty(x.shape)


def empty_gradients_of(*examples: Tensor) -> Callable[[Tensor], Tensor]:
    """`empty_gradient` for tensors in these layouts, without its check of every result where none can fail it."""
    return torch.empty_like if all([is_near(torch.empty_like(x)) for x in examples]) else empty_gradient


def empty_lse(q: Tensor) -> Tensor:
    """An empty tensor `[B, Hq, Nq]`, fp32, or fp64 for fp64 inputs."""
    return q.new_empty(q.shape[:-1], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def empty_kept(q: Tensor) -> Tensor:
    """An uninitialised tensor `[2, N]` for maxima and inverse sums of rows, N >= B * Hq * Nq. In half precision it is
    empty.
    """
    if q.dtype != torch.float32:
        return q.new_empty((0,))
    # For all sizes both halves are 16-byte aligned, as the compiled kernels expect.
    batch, heads, rows, _ = q.shape
    return q.new_empty((2, -(-batch * heads * rows // 4) * 4))

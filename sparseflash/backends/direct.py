"""Calls a backend's functions as one autograd node, when nothing compiles, traces or transforms the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparseflash.backends.saved import Saved

# Parameters are the only subclass of Tensor that surely does not override operators.
_PLAIN = (Tensor, torch.nn.Parameter)


class Differentiable(Protocol):
    """A forward and its backward. It lives as long as the graph, so it must not hold q, k, v or `tensors`: autograd
    saves these, where hooks for saved tensors reach them.
    """

    seed: Tensor | None  # of the dropout

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """`(out, lse, kept)` of `(q, k, v, *tensors)`. `kept` holds anything else that the backward needs."""

    def backward(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        """`(dq, dk, dv, *gradients)` of `(dout, dlse, saved, seed, *tensors)`.

        `dlse` is None if no gradient arrives for lse. A tensor that needs no gradient has None as its gradient.
        """

    def operator_backward(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        """`backward` through the registered operator, which raises if its gradients are differentiated again."""

    def repeated_backward(self, dout: Tensor, saved: Sequence[Any]) -> tuple[Tensor | None, ...] | None:
        """`(None, dq, dk, dv)` by kernels that have been prepared for tensors of these layouts; None if there are none,
        or if a tensor has no memory of its own, as a batch of gradients. saved: in the order of `_Direct.forward`.
        """


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Differentiable, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse, kept = run.forward(q, k, v, *tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, kept, run.seed, *tensors)
        ctx.run = run
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        # Unpacked only once: checkpointing's hooks allow no more.
        unpacked, run = ctx.saved_tensors, ctx.run
        if dlse is None and dout is not None and not torch.is_grad_enabled() and is_plain_call():
            found: tuple[Tensor | None, ...] | None = run.repeated_backward(dout, unpacked)
            if found is not None:
                return found
        q, k, v, out, lse, kept, seed, *tensors = unpacked
        if dout is None:
            dout = torch.zeros_like(out)
        batched = _holds_several(dout) or (dlse is not None and _holds_several(dlse))
        if torch.is_grad_enabled() or batched or not is_plain_call(dout, q, k, v, *tensors):
            return None, *run.operator_backward(dout, dlse, Saved(q, k, v, out, lse, kept), seed, *tensors)
        return None, *run.backward(dout, dlse, Saved(q, k, v, out, lse, kept), seed, *tensors)


# What the engine calls, without PyTorch's Python, which looks for the function anew at every call.
_Direct._backward_cls.apply = _Direct.backward  # type: ignore[attr-defined]

# `_Direct.apply` without its Python, which looks for wrappers that transforms of `torch.func` have left behind.
_apply: Callable[..., tuple[Tensor, Tensor]] = super(torch.autograd.Function, _Direct).apply


def call_directly(
    run: Differentiable, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor, have_memory: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out, lse)` of a plain call, with a graph for the backward if any input requires a gradient.

    tensors: the tensors of the score modifications. have_memory: whether all tensors surely have memory of their own,
    as no wrapper of `torch.func` has.
    """
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (tensors and any([x.requires_grad for x in tensors]))
    ):
        if not have_memory:
            return differentiably(run, q, k, v, *tensors)
        out, lse = _apply(run, q, k, v, *tensors)
        return out, lse
    out, lse, _ = run.forward(*as_recorded(q, k, v), *tensors)
    return out, lse


def as_recorded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, detached if no graph is recorded, so that a backend prepares no backward."""
    if torch.is_grad_enabled():
        return q, k, v
    q, k, v = [x.detach() if x.requires_grad else x for x in (q, k, v)]
    return q, k, v


def differentiably(run: Differentiable, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """`(out, lse)` as one autograd node, whether or not an input requires a gradient."""
    out, lse = _Direct.apply(run, q, k, v, *tensors)  # type: ignore[no-untyped-call]
    return out, lse


def is_plain_call(*tensors: Tensor, may_be_profiled: bool = False) -> bool:
    """Whether an operator on these tensors is a plain call: nothing compiles, traces, profiles or transforms it.

    may_be_profiled: for a choice of kernels, which must not differ while they are profiled.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and not torch._C._is_tracing()
        and (may_be_profiled or not torch._C._autograd._profiler_enabled())
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and (not tensors or are_plain(*tensors))
    )


def are_plain(*tensors: Tensor) -> bool:
    """Whether kernels can read the tensors' memory, and no tensor subclass overrides operators."""
    return all([type(x) in _PLAIN and not (x.is_meta or x.is_neg()) for x in tensors])


def _holds_several(gradient: Tensor) -> bool:
    """Whether a tensor is a batch of gradients (`is_grads_batched=True`), which its type and shape do not show."""
    return torch._C._functorch.is_legacy_batchedtensor(gradient)

"""Makes a backend callable: directly in plain eager mode, and as a registered PyTorch operator everywhere else.

A backend is a forward and a backward function of plain tensors and a `Problem`. What backends share with PyTorch is
here, in `direct.py` and in `refused_derivatives.py`, so that all behave alike: `opcheck` passes,
`torch.compile(fullgraph=True)` sees one opaque node, and nothing is saved for a backward that will not run.

Going through PyTorch's dispatcher and the Python of its autograd registration costs about 150 us for a forward and a
backward, more than both take on a short sequence. So unless something compiles, traces, profiles or transforms the
call, the backend's functions are called directly, in an autograd function of our own; see `direct.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparseflash.backends import flop_counter
from sparseflash.backends.direct import call_directly, is_plain_call
from sparseflash.backends.problem import Problem, schema
from sparseflash.backends.refused_derivatives import asked, refuse_second_gradients, refuse_transforms, refuse_unasked
from sparseflash.backends.saved import Saved
from sparseflash.backends.saved import schema as saved_schema

# `torch.library.custom_op` would add 8 us per call: it checks at run time what opcheck checks in the tests.
LIBRARY = torch.library.Library("sparseflash", "DEF")

# With cudagraph_unsafe torch.compile(mode="reduce-overhead") leaves the operator out of its CUDA graphs; a plan that
# the first call makes and caches would otherwise be allocated in their memory. Old versions of PyTorch lack the tag.
_TAGS = tuple(getattr(torch.Tag, tag) for tag in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, tag))

_PROBLEM, _SAVED = len(Problem._fields), len(Saved._fields)


class Operator:
    """A backend, called directly if the call is plain, and as the operator `sparseflash::{name}` otherwise."""

    def __init__(
        self, name: str, forward: Callable[..., Any], backward: Callable[..., Any],
        empty_kept: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        """Registers `sparseflash::{name}` and its backward.

        `forward(q, k, v, problem)` returns `(out, lse, kept)`, where `kept`, of the shape of `empty_kept(q)`, is what
        the backward needs besides the inputs and results. `backward(dout, dlse, saved, problem)` returns
        `(dq, dk, dv)`; `dlse` is None if no gradient arrives for lse. Outputs must have the strides of `empty_out`,
        `empty_lse` and `empty_gradient`.
        """
        self.name, self.forward, self._empty_kept = name, forward, empty_kept
        self.direct_backward = backward
        inputs, problem = "Tensor q, Tensor k, Tensor v", schema()
        self._packets = define(
            name, f"({inputs}, {problem}) -> (Tensor, Tensor, Tensor)", self._guarded, self._fake_forward
        ), define(
            f"{name}_backward",
            f"(Tensor dout, Tensor? dlse, {saved_schema()}, {problem}) -> (Tensor, Tensor, Tensor)",
            lambda dout, dlse, *rest: backward(dout, dlse, Saved(*rest[:_SAVED]), Problem(*rest[_SAVED:])),
            _fake_backward,
        )  # fmt: skip
        self._forward_op, self._backward_op = (packet.default for packet in self._packets)
        torch.library.register_autograd(
            f"sparseflash::{name}", self._differentiate, setup_context=_save, lib=LIBRARY
        )  # fmt: skip
        # Without this PyTorch would treat the gradients as constants, with no more than a warning.
        torch.library.register_autograd(f"sparseflash::{name}_backward", refuse_second_gradients(name), lib=LIBRARY)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        """`(out, lse)`, differentiable."""
        refuse_transforms(self.name, q, k, v)
        if is_plain_call(q, k, v):
            return call_directly(_Run(self, problem), q, k, v)
        self._let_count()
        if forward_ad._current_level < 0:
            out, lse, _ = self._forward_op(q, k, v, *problem)
            return out, lse
        asked.tangents = True
        try:
            out, lse, _ = self._forward_op(q, k, v, *problem)
            return out, lse
        finally:
            asked.tangents = False

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`(dq, dk, dv)` through the registered operator."""
        self._let_count()  # a counter may have been entered after the forward
        if saved.kept is None:
            saved = saved._replace(kept=self._empty_kept(saved.q))
        dq, dk, dv = self._backward_op(dout, dlse, *saved, *problem)
        return dq, dk, dv

    def _guarded(self, q: Tensor, k: Tensor, v: Tensor, *problem: Any) -> Any:
        refuse_unasked(self.name)
        return self.forward(q, k, v, Problem(*problem))

    def _fake_forward(self, q: Tensor, k: Tensor, v: Tensor, *problem: Any) -> tuple[Tensor, Tensor, Tensor]:
        refuse_unasked(self.name)
        return empty_out(q, v), empty_lse(q), self._empty_kept(q)

    def _let_count(self) -> None:
        if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0:
            forward, backward = self._packets
            flop_counter.tell((forward, flop_counter.forward_flops), (backward, flop_counter.backward_flops))

    def _differentiate(
        self, ctx: Any, dout: Tensor | None, dlse: Tensor | None, dkept: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * (3 + _PROBLEM)
        *tensors, seed = ctx.saved_tensors  # unpacked only once: checkpointing's hooks allow no more
        saved = Saved(*tensors)
        if dout is None:
            dout = torch.zeros_like(saved.out)
        dq, dk, dv = self.backward(dout, dlse, saved, ctx.problem._replace(seed=seed))
        return dq, dk, dv, *(None,) * _PROBLEM


class _Run:
    """A backend applied to one problem; see `Differentiable`."""

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

    def operator_backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, seed: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._operator.backward(dout, dlse, saved, self._problem._replace(seed=seed))


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_gradient(q), empty_gradient(k), empty_gradient(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, *fields = inputs
    problem = Problem(*fields)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(q, k, v, *output, problem.seed)
    # The mask's arrays are not saved like the tensors that depend on the inputs. They never change; their plans are
    # cached on them, and copies made by hooks for saved tensors would have none; and masks made under inference_mode(),
    # which cannot be saved, may be used in training.
    ctx.problem = problem._replace(seed=None)


def define(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Registers an operator and its fake implementation; returns its packet, with all overloads."""
    LIBRARY.define(name + schema, tags=_TAGS)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sparseflash::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.sparseflash, name)


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """`[B, Hq, Nq, Dv]` in the layout of `q`: heads inside tokens if q's are, so that merging heads needs no copy."""
    batch, heads, q_len, _ = q.shape
    if heads > 1 and q_len > 1 and q.stride(1) < q.stride(2):
        return q.new_empty(batch, q_len, heads, v.shape[-1]).transpose(1, 2)
    return q.new_empty(batch, heads, q_len, v.shape[-1])


def empty_gradient(x: Tensor) -> Tensor:
    """A tensor in the layout of `x`; contiguous if `x` overlaps itself so that tokens would become innermost."""
    gradient = torch.empty_like(x)
    return gradient if gradient.stride(-1) == 1 else x.new_empty(x.shape)


def empty_lse(q: Tensor) -> Tensor:
    """`[B, Hq, Nq]`, fp32, or fp64 for fp64 inputs."""
    return q.new_empty(q.shape[:-1], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)

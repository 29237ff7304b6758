"""Makes a backend callable: directly in plain eager mode, and as a registered PyTorch operator everywhere else.

A backend is a forward and a backward function of plain tensors and a `Problem`. Everything that backends share with
PyTorch is here, so that all behave alike: `opcheck` passes, `torch.compile(fullgraph=True)` sees one opaque node, and
nothing is saved for a backward that will not run.

Going through PyTorch's dispatcher and the Python of its autograd registration costs about 150 us for a forward and a
backward, more than both take on a short sequence. So unless something compiles, traces, profiles or transforms the
call, the backend's functions are called directly, in an autograd function of our own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparseflash.backends import flop_counter
from sparseflash.backends.problem import Problem, schema

# `torch.library.custom_op` would add 8 us per call: it checks at run time what opcheck checks in the tests.
LIBRARY = torch.library.Library("sparseflash", "DEF")

# With cudagraph_unsafe torch.compile(mode="reduce-overhead") leaves the operator out of its CUDA graphs; a plan that
# the first call makes and caches would otherwise be allocated in their memory. Old versions of PyTorch lack the tag.
_TAGS = tuple(getattr(torch.Tag, tag) for tag in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, tag))

_PROBLEM = len(Problem._fields)

# A parameter, as most learned tensors of changes are, is a subclass that takes no notice of operators; others may.
_PLAIN = (Tensor, torch.nn.Parameter)


class Differentiable(Protocol):
    """A forward and its backward, for tensors and a problem that have been checked to fit.

    It lives as long as the graph, so it must not hold q, k, v or the tensors of changes of scores (`tensors`, if there
    are any): these are saved where PyTorch's hooks for saved tensors reach them.
    """

    seed: Tensor | None  # of the dropout

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """`(out, lse, kept)` of `(q, k, v, *tensors)`; `kept` is what the backward needs besides these and results."""

    def backward(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        """`(dq, dk, dv, *gradients)` of `(dout, dlse, q, k, v, out, lse, kept, seed, *tensors)`.

        `dlse` is None if no gradient arrives for lse. A gradient is None if its tensor wants none.
        """

    def operator_backward(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        """The same through the registered operator, which raises if its gradients are differentiated again."""


class _Direct(torch.autograd.Function):
    """A backend's functions as one autograd node, without the dispatcher."""

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
        saved = ctx.saved_tensors  # unpacked only once: checkpointing's hooks allow no more
        q, k, v, out, _, _, _, *tensors = saved
        if dout is None:
            dout = torch.zeros_like(out)
        run = ctx.run
        batched = _holds_several(dout) or (dlse is not None and _holds_several(dlse))
        if torch.is_grad_enabled() or batched or not is_plain_call(dout, q, k, v, *tensors):
            return None, *run.operator_backward(dout, dlse, *saved)
        return None, *run.backward(dout, dlse, *saved)


def call_directly(run: Differentiable, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of a plain call, with a graph for the backward if a gradient is wanted.

    tensors: of the changes of scores.
    """
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or any(x.requires_grad for x in tensors)
    ):
        return differentiably(run, q, k, v, *tensors)
    out, lse, _ = run.forward(q, k, v, *tensors)
    return out, lse


def differentiably(run: Differentiable, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """`(out, lse)` as one autograd node, even where tensors do not say whether a gradient is wanted."""
    out, lse = _Direct.apply(run, q, k, v, *tensors)  # type: ignore[no-untyped-call]
    return out, lse


class Operator:
    """A backend, called directly if the call is plain, and as the operator `sparseflash::{name}` otherwise."""

    def __init__(
        self, name: str, forward: Callable[..., Any], backward: Callable[..., Any],
        empty_kept: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        """Registers `sparseflash::{name}` and its backward.

        `forward(q, k, v, problem)` returns `(out, lse, kept)`, where `kept`, of the shape of `empty_kept(q)`, is what
        the backward needs besides the inputs and results. `backward(dout, dlse, q, k, v, out, lse, kept, problem)`
        returns `(dq, dk, dv)`; `dlse` is None if no gradient arrives for lse. Outputs must have the strides of
        `empty_out`, `empty_lse` and `empty_gradient`.
        """
        self.name, self.forward, self._empty_kept = name, forward, empty_kept
        self.direct_backward = backward
        inputs, problem = "Tensor q, Tensor k, Tensor v", schema()
        self._packets = define(
            name, f"({inputs}, {problem}) -> (Tensor, Tensor, Tensor)", self._guarded, self._fake_forward
        ), define(
            f"{name}_backward",
            f"(Tensor dout, Tensor? dlse, {inputs}, Tensor out, Tensor lse, Tensor kept, {problem}) "
            "-> (Tensor, Tensor, Tensor)",
            lambda *given: backward(*given[:8], Problem(*given[8:])), _fake_backward,
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
        _asked.tangents = True
        try:
            out, lse, _ = self._forward_op(q, k, v, *problem)
            return out, lse
        finally:
            _asked.tangents = False

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        kept: Tensor | None, problem: Problem,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`(dq, dk, dv)` through the registered operator."""
        self._let_count()  # a counter may have been entered after the forward
        kept = self._empty_kept(q) if kept is None else kept
        dq, dk, dv = self._backward_op(dout, dlse, q, k, v, out, lse, kept, *problem)
        return dq, dk, dv

    def _guarded(self, q: Tensor, k: Tensor, v: Tensor, *problem: Any) -> Any:
        _refuse_unasked(self.name)
        return self.forward(q, k, v, Problem(*problem))

    def _fake_forward(self, q: Tensor, k: Tensor, v: Tensor, *problem: Any) -> tuple[Tensor, Tensor, Tensor]:
        _refuse_unasked(self.name)
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
        *saved, seed = ctx.saved_tensors  # unpacked only once: checkpointing's hooks allow no more
        if dout is None:
            dout = torch.zeros_like(saved[3])
        q, k, v, out, lse, kept = saved
        dq, dk, dv = self.backward(dout, dlse, q, k, v, out, lse, kept, ctx.problem._replace(seed=seed))
        return dq, dk, dv, *(None,) * _PROBLEM


def refuse_second_gradients(name: str) -> Callable[..., NoReturn]:
    """A backward of a backend's backward, which says that there is none."""

    def refuse(ctx: Any, *gradients: Any) -> NoReturn:
        raise NotImplementedError(
            f"gradients of gradients are not implemented by the {name} backend; backend='reference' has them."
        )

    return refuse


class _Run:
    """A backend applied to one problem; see `Differentiable`."""

    def __init__(self, operator: Operator, problem: Problem) -> None:
        self._operator, self._problem, self.seed = operator, problem, problem.seed

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        out, lse, kept = self._operator.forward(q, k, v, self._problem)
        return out, lse, kept

    def backward(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = self._operator.direct_backward(*given[:-1], self._problem._replace(seed=given[-1]))
        return dq, dk, dv

    def operator_backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        kept: Tensor | None, seed: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return self._operator.backward(dout, dlse, q, k, v, out, lse, kept, self._problem._replace(seed=seed))


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


# Set while this thread runs a call whose inputs have been checked to have no tangents.
_asked = threading.local()


def _refuse_unasked(name: str) -> None:
    """Raises if forward-mode derivatives are taken around compiled code, which would silently treat them as 0.

    It cannot be seen here whether any of the operator's own inputs has a tangent.
    """
    if forward_ad._current_level >= 0 and not getattr(_asked, "tangents", False):
        raise _no_forward_mode(name)


def refuse_transforms(name: str, *tensors: Tensor) -> None:
    """Raises for derivatives that PyTorch would silently treat as 0, or refuse with an obscure error."""
    if torch.compiler.is_compiling():
        return
    # Checks outer transforms, too: for torch.func.grad(torch.vmap(f)) the innermost one is vmap.
    transforms = [each.key() for each in torch._C._functorch.get_interpreter_stack() or ()]
    if torch._C._functorch.TransformType.Grad in transforms:
        raise NotImplementedError(
            f"torch.func.grad and functions based on it are not implemented by the {name} backend; torch.autograd.grad "
            "and backward() are, and backend='reference' has all of them."
        )
    if forward_ad._current_level >= 0:
        # A tensor wrapped by vmap does not reveal its tangent.
        nested = torch._C._functorch.TransformType.Jvp in transforms and len(transforms) > 1
        if nested or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            raise _no_forward_mode(name)


def _no_forward_mode(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"forward-mode derivatives (jvp, jacfwd) are not implemented by the {name} backend; "
        "backend='reference' has them."
    )


def is_plain_call(*tensors: Tensor) -> bool:
    """Whether an operator on these tensors is a plain call: nothing compiles, traces, profiles or transforms it."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and not torch._C._is_tracing()
        and not torch._C._autograd._profiler_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and are_plain(*tensors)
    )


def are_plain(*tensors: Tensor) -> bool:
    """Whether tensors have memory that kernels can read, and no class that takes notice of operators."""
    return all([type(x) in _PLAIN and not (x.is_meta or x.is_neg()) for x in tensors])  # faster than a generator


def _holds_several(gradient: Tensor) -> bool:
    """Whether it holds several gradients, as with `torch.autograd.grad(is_grads_batched=True)`, and only the dispatcher
    knows.
    """
    return torch._C._functorch.is_legacy_batchedtensor(gradient)


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

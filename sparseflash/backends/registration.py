"""Registers a backend as a PyTorch operator: autograd, fake tensors, torch.compile.

A backend is a forward and a backward function over plain tensors and numbers. What they share with PyTorch, and
nothing else, is here, so that every backend is the same citizen: `opcheck` passes, `torch.compile(fullgraph=True)`
sees one opaque node, and no gradient state is saved when none is wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparseflash.backends import flop_counter

# A mask as the operator sees it, in the order of the arguments. All None: dense attention.
_MASK_ARRAYS = "Tensor? indptr, Tensor? indices, Tensor? tile, Tensor? words, Tensor? pattern, Tensor? lengths"
_NUMBERS = "SymInt block_q, SymInt block_k, float scale"
_DROPOUT = "Tensor? seed=None, int dropped=0"  # see dropout.py
_MASK_ARGUMENTS = 6
_NUMBER_ARGUMENTS = 3
_DROPOUT_ARGUMENTS = 2

# `torch.library.custom_op` would do the same with 8 us more a call: it checks at run time what opcheck checks in tests.
_LIBRARY = torch.library.Library("sparseflash", "DEF")

# torch.compile(mode="reduce-overhead") leaves the operator out of its CUDA graphs, in whose memory a plan made by a
# first call, and kept for others, would otherwise lie. Old versions of PyTorch do not know the tag.
_TAGS = tuple(getattr(torch.Tag, tag) for tag in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, tag))

Operator = Callable[..., tuple[Tensor, Tensor, Tensor]]


def register(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], empty_kept: Callable[[Tensor], Tensor]
) -> Operator:
    """Registers `sparseflash::{name}` and its backward; returns a function that calls it.

    `forward(q, k, v, *mask_arrays, block_q, block_k, scale, seed, dropped)` returns `(out, lse, kept)`, where `kept`,
    of the shape of `empty_kept(q)`, is what this backend's backward wants beside the rest;
    `backward(dout, dlse, q, k, v, out, lse, kept, *mask_arrays, block_q, block_k, scale, seed, dropped)` returns
    `(dq, dk, dv)`; `dlse` is None if no gradient comes through lse.
    Passing PyTorch's dispatcher and the Python of the autograd registration costs about 20 us a call, which is much for
    a short sequence, so where no gradient is wanted and nobody would see the operator pass, the returned function calls
    `forward` itself.
    Outputs must have the strides of `empty_out`, `empty_lse` and `empty_gradient`.
    """
    inputs = "Tensor q, Tensor k, Tensor v"

    def guarded(*arguments: Any) -> Any:
        _refuse_unasked(name)
        return forward(*arguments)

    _define(name, f"({inputs}, {_MASK_ARRAYS}, {_NUMBERS}, {_DROPOUT}) -> (Tensor, Tensor, Tensor)", guarded)
    _define(
        f"{name}_backward",
        f"(Tensor dout, Tensor? dlse, {inputs}, Tensor out, Tensor lse, Tensor kept, {_MASK_ARRAYS}, {_NUMBERS}, "
        f"{_DROPOUT}) -> (Tensor, Tensor, Tensor)",
        backward,
    )
    forward_op: Operator = getattr(torch.ops.sparseflash, name).default
    backward_op = getattr(torch.ops.sparseflash, f"{name}_backward").default

    def fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        _refuse_unasked(name)
        return empty_out(q, v), empty_lse(q), empty_kept(q)

    def fake_backward(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return empty_gradient(q), empty_gradient(k), empty_gradient(v)

    packets = getattr(torch.ops.sparseflash, name), getattr(torch.ops.sparseflash, f"{name}_backward")

    def let_count() -> None:
        if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0:
            flop_counter.tell((packets[0], flop_counter.forward_flops), (packets[1], flop_counter.backward_flops))

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        q, k, v, *rest, seed, dropped = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(q, k, v, *output, seed)
        # Not saved as what depends on the inputs is: they never change, plans are kept on them, which copies made by
        # hooks for saved tensors would lack, and masks made under inference_mode() may be trained with.
        ctx.mask_arrays = rest[:_MASK_ARGUMENTS]
        ctx.numbers = *rest[_MASK_ARGUMENTS:], dropped

    def differentiate(
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, dkept: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * (3 + _MASK_ARGUMENTS + _NUMBER_ARGUMENTS + _DROPOUT_ARGUMENTS)
        *saved, seed = ctx.saved_tensors  # once: hooks of checkpointing hand them out once
        if dout is None:
            dout = torch.zeros_like(saved[3])
        *numbers, dropped = ctx.numbers
        let_count()  # the forward may have been called before anybody counted
        dq, dk, dv = backward_op(dout, dlse, *saved, *ctx.mask_arrays, *numbers, seed, dropped)
        return dq, dk, dv, *(None,) * (_MASK_ARGUMENTS + _NUMBER_ARGUMENTS + _DROPOUT_ARGUMENTS)

    def refuse(ctx: Any, *gradients: Any) -> NoReturn:
        raise NotImplementedError(
            f"gradients of gradients are not implemented by the {name} backend; backend='reference' has them."
        )

    torch.library.register_fake(f"sparseflash::{name}", fake_forward, lib=_LIBRARY)
    torch.library.register_fake(f"sparseflash::{name}_backward", fake_backward, lib=_LIBRARY)
    torch.library.register_autograd(f"sparseflash::{name}", differentiate, setup_context=save, lib=_LIBRARY)
    # Without this PyTorch would take the gradients for constants, and say so in a warning only.
    torch.library.register_autograd(f"sparseflash::{name}_backward", refuse, lib=_LIBRARY)

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        _refuse_transforms(name, q, k, v)
        wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if not wanted and nobody_watches(q, k, v):
            out, lse, kept = forward(q, k, v, *rest)
            return out, lse, kept
        let_count()
        if forward_ad._current_level < 0:
            return forward_op(q, k, v, *rest)
        _asked.tangents = True
        try:
            return forward_op(q, k, v, *rest)
        finally:
            _asked.tangents = False

    return run


# Whether the call that runs in this thread was asked for its tangents, and has none.
_asked = threading.local()


def _refuse_unasked(name: str) -> None:
    """Raises where forward-mode derivatives are taken around compiled code, which would have 0 for them.

    Whether it is an input of this operator that has a tangent cannot be seen there.
    """
    if forward_ad._current_level >= 0 and not getattr(_asked, "tangents", False):
        raise _no_forward_mode(name)


def _refuse_transforms(name: str, *tensors: Tensor) -> None:
    """Raises where derivatives are wanted that PyTorch would silently take for 0, or fail at in words of its own."""
    if torch.compiler.is_compiling():
        return
    # Transforms around others are asked, too: of torch.func.grad(torch.vmap(f)) the innermost is vmap.
    transforms = [each.key() for each in torch._C._functorch.get_interpreter_stack() or ()]
    if torch._C._functorch.TransformType.Grad in transforms:
        raise NotImplementedError(
            f"torch.func.grad and what is made of it are not implemented by the {name} backend; torch.autograd.grad "
            "and backward() are, and backend='reference' has all."
        )
    if forward_ad._current_level >= 0:
        # What vmap wraps cannot be asked for its tangent.
        nested = torch._C._functorch.TransformType.Jvp in transforms and len(transforms) > 1
        if nested or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            raise _no_forward_mode(name)


def _no_forward_mode(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"forward-mode derivatives (jvp, jacfwd) are not implemented by the {name} backend; "
        "backend='reference' has them."
    )


def nobody_watches(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether an operator on these tensors is a plain call: nothing compiles, traces, profiles or transforms."""
    return (
        not torch.compiler.is_compiling()
        and type(q) is type(k) is type(v) is Tensor
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and not torch._C._is_tracing()
        and not torch._C._autograd._profiler_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not (q.is_meta or q.is_neg() or k.is_neg() or v.is_neg())
    )


def _define(name: str, schema: str, function: Callable[..., Any]) -> None:
    _LIBRARY.define(name + schema, tags=_TAGS)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """`[B, Hq, Nq, Dv]`, laid out as `q` is: heads inside tokens if q's are, so that merging heads copies nothing."""
    batch, heads, q_len, _ = q.shape
    if heads > 1 and q_len > 1 and q.stride(1) < q.stride(2):
        return q.new_empty(batch, q_len, heads, v.shape[-1]).transpose(1, 2)
    return q.new_empty(batch, heads, q_len, v.shape[-1])


def empty_gradient(x: Tensor) -> Tensor:
    """Laid out as `x` is; contiguous, if `x` overlaps itself so that tokens would be innermost."""
    gradient = torch.empty_like(x)
    return gradient if gradient.stride(-1) == 1 else x.new_empty(x.shape)


def empty_lse(q: Tensor) -> Tensor:
    """`[B, Hq, Nq]`, fp32, or fp64 for fp64 inputs."""
    return q.new_empty(q.shape[:-1], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)

"""Refuses derivatives and transforms that PyTorch would silently get wrong, or reject with an obscure error."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad


def refuse_second_gradients(name: str) -> Callable[..., NoReturn]:
    """A function to register as the backward of a backend's backward; it raises NotImplementedError."""

    def refuse(ctx: Any, *gradients: Any) -> NoReturn:
        raise NotImplementedError(no_second_gradients(name))

    return refuse


def no_second_gradients(name: str) -> str:
    """The error text of a backend whose gradients cannot be differentiated."""
    return f"gradients of gradients are not implemented by the {name} backend; backend='reference' has them."


# Set while this thread runs a call whose inputs have been checked to have no tangents.
asked = threading.local()


def refuse_unasked(name: str) -> None:
    """Raises if forward-mode derivatives are taken around compiled code, which would treat them as 0.

    Inside the operator PyTorch does not show whether an input has a tangent, so any forward-mode level is refused.
    """
    if forward_ad._current_level >= 0 and not getattr(asked, "tangents", False):
        raise _no_forward_mode(name)


def refuse_functional_gradients(name: str) -> None:
    """Raises inside torch.func.grad: PyTorch would silently return 0, or fail with an obscure error."""
    if not torch.compiler.is_compiling() and torch._C._functorch.TransformType.Grad in _transforms():
        raise NotImplementedError(
            f"torch.func.grad and functions based on it are not implemented by the {name} backend; torch.autograd.grad "
            "and backward() are, and backend='reference' has all of them."
        )


def refuse_tangents(name: str, *tensors: Tensor | None) -> None:
    """Raises if any tensor has a forward-mode tangent, which PyTorch would silently treat as 0."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    transforms = _transforms()
    # A tensor wrapped by vmap does not reveal its tangent.
    nested = torch._C._functorch.TransformType.Jvp in transforms and len(transforms) > 1
    if nested or any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise _no_forward_mode(name)


def refuse_vmap(name: str, *tensors: Tensor, around: bool) -> None:
    """Raises for tensors wrapped by torch.vmap: an operator with a list of tensors has no batching rule.

    around: raise inside any torch.vmap, even if no tensor is wrapped.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.TransformType.Vmap in _transforms() and (
        around or any(torch._C._functorch.is_batchedtensor(x) for x in tensors)
    ):
        raise NotImplementedError(
            f"torch.vmap over an attention whose scores are changed is not implemented by the {name} backend; "
            "backend='reference' has it. Or call attention once, with the batch in the first dimension of q, k and v."
        )


def refuse_batched_gradients(name: str, *gradients: Tensor | None) -> None:
    """Raises for batches of gradients: an operator with a list of tensors has no batching rule."""
    if any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in gradients):
        raise NotImplementedError(
            f"gradients in batches (is_grads_batched=True) are not implemented by the {name} backend where scores are "
            "changed; backend='reference' has them. Or take one gradient after another."
        )


def refuse_recording(name: str) -> None:
    """Raises while torch.export or another tracer records operations, and inside torch.func.functionalize.
    `scores.function` has no registered operator, so the recording would miss the backend's work.
    """
    # The module is not imported here, which may take seconds: an active tracer has imported it already.
    proxy_mode = getattr(sys.modules.get("torch.fx.experimental.proxy_tensor"), "get_proxy_mode", lambda: None)
    is_functional = torch._C._functorch.TransformType.Functionalize in _transforms()
    if is_functional or torch._C._is_tracing() or proxy_mode() is not None:
        raise NotImplementedError(
            "torch.export, torch.func.functionalize and other tracers cannot record scores.function with the "
            f"{name} backend; backend='reference' has it. All other score modifications can be recorded."
        )


def _transforms() -> list[Any]:
    return [each.key() for each in torch._C._functorch.get_interpreter_stack() or ()]


def _no_forward_mode(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"forward-mode derivatives (jvp, jacfwd) are not implemented by the {name} backend; "
        "backend='reference' has them."
    )

"""Derivatives and transforms that PyTorch would silently get wrong, or refuse with an obscure error, and how backends
refuse them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad


def refuse_second_gradients(name: str) -> Callable[..., NoReturn]:
    """A backward of a backend's backward, which says that there is none."""

    def refuse(ctx: Any, *gradients: Any) -> NoReturn:
        raise NotImplementedError(
            f"gradients of gradients are not implemented by the {name} backend; backend='reference' has them."
        )

    return refuse


# Set while this thread runs a call whose inputs have been checked to have no tangents.
asked = threading.local()


def refuse_unasked(name: str) -> None:
    """Raises if forward-mode derivatives are taken around compiled code, which would silently treat them as 0.

    It cannot be seen here whether any of the operator's own inputs has a tangent.
    """
    if forward_ad._current_level >= 0 and not getattr(asked, "tangents", False):
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


def refuse_vmap(name: str, *tensors: Tensor, around: bool) -> None:
    """Raises for tensors that torch.vmap wraps, for which an operator with a list of tensors has no rule; `around`:
    wherever it is taken around the call.
    """
    if torch.compiler.is_compiling():
        return
    transforms = [each.key() for each in torch._C._functorch.get_interpreter_stack() or ()]
    if torch._C._functorch.TransformType.Vmap in transforms and (
        around or any(torch._C._functorch.is_batchedtensor(x) for x in tensors)
    ):
        raise NotImplementedError(
            f"torch.vmap over an attention whose scores are changed is not implemented by the {name} backend; "
            "backend='reference' has it. Or call attention once, with the batch in the first dimension of q, k and v."
        )


def _no_forward_mode(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"forward-mode derivatives (jvp, jacfwd) are not implemented by the {name} backend; "
        "backend='reference' has them."
    )

"""Registers PyTorch operators, refuses derivatives that they do not have, and makes their empty results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from sparseflash.backends.refused_derivatives import asked, refuse_second_gradients, refuse_tangents, refuse_unasked
from sparseflash.limits import FAR, is_near

# `torch.library.custom_op` checks at run time what opcheck checks in the tests.
LIBRARY = torch.library.Library("sparseflash", "DEF")

# cudagraph_unsafe makes torch.compile(mode="reduce-overhead") leave the operator out of its CUDA graphs: the plan
# that the first call caches would lie in the graph's memory pool. Old PyTorch lacks the tag.
_TAGS = tuple(getattr(torch.Tag, tag) for tag in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, tag))


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

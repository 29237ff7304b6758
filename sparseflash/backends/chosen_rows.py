"""The gradients of `grouped.selected_attention`: blocks of keys gather the queries that have chosen them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.direct import is_plain_call
from sparseflash.backends.problem import Problem
from sparseflash.backends.refused_derivatives import no_second_gradients
from sparseflash.backends.saved import Saved
from sparseflash.blockmask import BlockMask
from sparseflash.first_derivatives import first_derivatives
from sparseflash.limits import COUNT

_WIDEST, _WIDEST_VALUE = 192, 128  # head dims, of whose keys a tile fits into registers with its sums


def gathers(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float, backend: str | None
) -> bool:  # fmt: skip
    """Whether `attend` serves a call and its gradients are wanted."""
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if not wanted or backend not in (None, "triton") or (q.device.type != "cuda" and backend is None):
        return False
    if q.dtype not in (torch.float16, torch.bfloat16) or scale <= 0.0 or not index.numel() or not k.numel():
        return False
    if not (16 <= q.shape[3] <= _WIDEST and 16 <= v.shape[3] <= _WIDEST_VALUE):
        return False
    count = index.numel() << (index.shape[3] - 1).bit_length()
    return count < COUNT and is_plain_call(q, k, v)


def attend(
    rows: Tensor, k: Tensor, v: Tensor, mask: BlockMask, index: Tensor, *, group: int, span: int, causal: bool,
    scale: float, forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out, lse)` of `forward`, which is attention with the mask of the lists `index [B, Hkv, Nq, K]`.

    rows: `[B, Hkv, Nq * heads, D]`, of whose heads the first `group` are those of a query, the others zeros.
    """
    found: tuple[Tensor, Tensor] = _Attention.apply(  # type: ignore[no-untyped-call]
        rows, k, v, mask, index, group, span, causal, scale, forward
    )
    return found


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, k: Tensor, v: Tensor, mask: BlockMask, index: Tensor, *how: Any
    ) -> tuple[Tensor, Tensor]:
        *places, scale, run = how
        problem = Problem.of(mask, scale=scale, batch=rows.shape[0], kernels="portable")
        ctx.gradients = partial(_gradients, problem, *places)
        out, lse = run(rows.detach(), k.detach(), v.detach())  # detached, so that the usual backward is not prepared
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, k, v, out, lse, index)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * 10
        return *first_derivatives(
            no_second_gradients("triton"), ctx.gradients, dout, dlse, *ctx.saved_tensors
        ), *(None,) * 7  # fmt: skip


def _gradients(
    problem: Problem, group: int, span: int, causal: bool, dout: Tensor | None, dlse: Tensor | None, rows: Tensor,
    k: Tensor, v: Tensor, out: Tensor, lse: Tensor, index: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from sparseflash.backends.triton.prepared_call import as_kernels_read, prepared
    from sparseflash.backends.triton.selected.block_api import gradients_of_keys

    dout = torch.zeros_like(out) if dout is None else dout
    dout, dlse, saved = as_kernels_read(dout, dlse, Saved(rows, k, v, out, lse, None))
    run: Any = prepared(rows, k, v, problem).backward_pass(rows, k, v, saved.out, dout, dlse=dlse is not None)
    dq, lse2, delta = run.of_queries(dout, dlse, saved, problem.lengths)
    dk, dv = gradients_of_keys(rows, k, v, dout, lse2, delta, index, group, span, causal, problem.scale)
    return dq, dk, dv

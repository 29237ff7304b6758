"""`attention()`: the one call. Checks the inputs, picks the backend."""

from __future__ import annotations

import inspect
from typing import Any, Literal, overload

import torch
from torch import Tensor

from sparseflash import dropout
from sparseflash.backends import blockwise, reference
from sparseflash.backends.problem import Problem
from sparseflash.backends.triton import call_cache
from sparseflash.blockmask import BlockMask
from sparseflash.remedies import refuse
from sparseflash.validation import check_mask, check_tensors, checked_scale

BACKENDS = ("triton", "blockwise", "reference")
Backend = Literal["triton", "blockwise", "reference"]
# Which kernels of the Triton backend a choice of backend asks for; "": those that it picks.
KERNELS = {None: "", "triton": "portable"}


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None = None, *, scale: float | None = None,
    return_lse: Literal[False] = False, dropout_p: float = 0.0, seed: int | Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None = None, *, scale: float | None = None,
    return_lse: Literal[True], dropout_p: float = 0.0, seed: int | Tensor | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    backend: Backend | None = None,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over the live scores of `mask`: `softmax(scale * q k^T, live scores only) v`.

    Args:
        q: queries `[B, Hq, Nq, D]`.
        k: keys `[B, Hkv, Nk, D]`; Hq is a multiple of Hkv (grouped and multi-query attention: query head h reads
            key head `h // (Hq // Hkv)`).
        v: values `[B, Hkv, Nk, Dv]`. All three have one floating dtype and lie on one device; any strides with a
            contiguous last dimension. The kernel reads a copy of what has rows that begin off multiples of 16 bytes.
        mask: the live scores; its lengths are Nq and Nk, its batch and head counts those of q or 1. None: all live.
            It must lie on q's device: move it once with `mask.to(device)`. It is not moved for you, because a copy
            at every call, or a hidden one kept in device memory, would be a surprise. What lies past a sequence's
            length (`mask.with_lengths`) is dead, but must be finite, as all dead keys and their values must: zeros,
            say, not uninitialised memory, because a weight of 0 times NaN is NaN.
        scale: factor of the scores, `1 / sqrt(D)` by default.
        return_lse: also return `lse [B, Hq, Nq]`, the natural logarithm of the sum of exponentials of a query's live
            scores, in fp32 (fp64 for fp64 inputs). It is differentiable too, and does not know of dropout.
        dropout_p: the probability with which a weight of the softmax is replaced by 0, in steps of 1/256, at least
            one unless it is 0, at most 255; the others are divided by what is left. Below 1. As in PyTorch's own
            attention it is yours to set it to 0 when you do not train.
        seed: of the dropout: an int, or, so that it can change inside a CUDA graph, one int64 in a tensor on q's
            device. The same seed drops the same weights in every backend and on every device (`dropout.keep_mask`
            says which). None: drawn from PyTorch's generator of q's device, so `torch.manual_seed` fixes it.
        backend: `"triton"`, the GPU kernel (fp16, bf16, fp32; D and Dv from 16 to 256), is the default for CUDA
            tensors; `"blockwise"`, PyTorch over the live tiles, for all others; `"reference"` computes the dense
            matrix and defines the semantics. A backend that cannot run raises; none falls back to another.

    Returns:
        `out [B, Hq, Nq, Dv]` in the inputs' dtype, or `(out, lse)`. A query without a live key has `out = 0` and
        `lse = -inf`, and its gradients are 0; a key without a live query has gradients 0.

    Raises:
        TypeError, ValueError: inputs that do not fit together; the message says what must hold and what came.
        RuntimeError: the backend cannot run here (no Triton, GPU too old, CPU tensors without Triton's interpreter).

    Under `torch.autocast` the inputs are cast as for PyTorch's own attention. fp32 on the GPU uses TF32 if PyTorch's
    matrix products do (`torch.backends.cuda.matmul`); if not, tensor cores multiply three pieces of every number, which
    errs no more than fp32 does; while it runs q, k, v and the gradient of the output stand in pieces, too, 6 bytes a
    number, unless few keys are read (what is infinite gives NaN). Forward and backward give the same bits every
    time (blockwise: on the CPU). Gradients of gradients, forward-mode derivatives and `torch.func.grad` are not
    implemented, except by the reference. To record it in a CUDA graph, call it once before with tensors of the same
    layout.

    >>> q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
    >>> mask = BlockMask.from_function(lambda q, k: (k <= q) & (q - k < 32), 100, block=32)
    >>> attention(q, k, v, mask).shape
    torch.Size([1, 2, 100, 16])
    """
    if others:
        refuse(others)
    place = None
    kernels = KERNELS.get(backend)
    if kernels is not None and type(dropout_p) is float and dropout_p == 0.0:
        place = call_cache.place_of(q, k, v, mask, scale, kernels, on_gpu_only=backend is None)
        if place is not None and (call := place[0].get(place[1])) is not None:
            out, lse = call_cache.run(call, q, k, v, mask)
            return (out, lse) if return_lse else out
    check_tensors(q, k, v)
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):  # PyTorch knows no autocast of meta
        q, k, v = _as_autocast_wants(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype; got {q.dtype}, {k.dtype} and {v.dtype}.")
    if mask is not None:
        check_mask(mask, q, k)
    scale = checked_scale(scale, q.shape[-1])
    dropped = dropout.threshold(dropout_p)
    seeds = dropout.seed_tensor(seed, q.device) if dropped else None
    chosen, _ = chosen_backend(backend, q.device)
    if chosen == "reference":
        out, lse = reference.attention(q, k, v, mask, scale, *((seeds, dropped) if dropped else ()))
        return (out, lse) if return_lse else out
    if chosen == "blockwise":
        problem = Problem.of(mask, scale=scale, batch=q.shape[0], seed=seeds, dropped=dropped)
        out, lse = blockwise.attention(q, k, v, problem)
        return (out, lse) if return_lse else out
    from sparseflash.backends.triton import api  # only here: the library works where Triton is missing

    if scale < 0:  # the kernels take the maximum before they scale, which only a positive scale allows
        q, scale, place = -q, -scale, None
    problem = Problem.of(mask, scale=scale, batch=q.shape[0], seed=seeds, dropped=dropped, kernels=KERNELS[backend])
    if place is not None and q.numel() and k.numel():
        api.check(q, k, v)
        call = place[0].put(place[1], api.Call(q, k, v, problem))
        out, lse = call_cache.run(call, q, k, v, mask)
    else:
        out, lse = api.attention(q, k, v, problem)
    return (out, lse) if return_lse else out


# `others` is no part of what attention takes: it catches what other attentions take.
_signature = inspect.signature(attention)
attention.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[p for p in _signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
)


def chosen_backend(backend: str | None, device: torch.device) -> tuple[str, str]:
    """The backend that computes, and why; raises ValueError for one that does not exist."""
    if backend is None:
        name = "triton" if device.type == "cuda" else "blockwise"
        return name, f"the default for tensors on {device.type}"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, or None; got {backend!r}.")
    return backend, "asked for"


def _as_autocast_wants(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.get_autocast_dtype(q.device.type)
    # fp64 stays, as it does in PyTorch's own casts.
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v

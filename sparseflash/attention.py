"""`attention()`: the one call. Checks the inputs, picks the backend."""

from __future__ import annotations

import inspect
import math
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from sparseflash import dropout
from sparseflash.backends import blockwise, reference
from sparseflash.backends.triton import call_cache
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import described
from sparseflash.remedies import refuse

BACKENDS = ("triton", "blockwise", "reference")
Backend = Literal["triton", "blockwise", "reference"]
_DENSE_BLOCK = 128
_KEPT_BACKENDS = (None, "triton")  # whose calls may be kept, see call_cache.py
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
    if type(dropout_p) is float and dropout_p == 0.0 and backend in _KEPT_BACKENDS:
        place = call_cache.place_of(q, k, v, mask, scale, default=backend is None)
        if place is not None and (call := call_cache.found(place)) is not None:
            out, lse = call(q, k, v)
            return (out, lse) if return_lse else out
    _check_tensors(q, k, v)
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):  # PyTorch knows no autocast of meta
        q, k, v = _as_autocast_wants(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype; got {q.dtype}, {k.dtype} and {v.dtype}.")
    if mask is not None:
        _check_mask(mask, q, k)
    scale = _scale(scale, q.shape[-1])
    dropped = dropout.threshold(dropout_p)
    dropping = (dropout.seed_tensor(seed, q.device), dropped) if dropped else ()
    if backend is None:
        backend = "triton" if q.device.type == "cuda" else "blockwise"
    if backend == "reference":
        out, lse = reference.attention(q, k, v, mask, scale, *dropping)
        return (out, lse) if return_lse else out
    if backend == "blockwise":
        operator = blockwise.attention
    elif backend == "triton":
        from sparseflash.backends.triton.api import (
            attention as triton_attention,  # only here: the library works where Triton is missing
        )

        operator = triton_attention
        if scale < 0:  # the kernel takes the maximum before it scales, which only a positive scale allows
            q, scale, place = -q, -scale, None
    else:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, or None; got {backend!r}.")
    arrays: tuple[Tensor | None, ...] = (None,) * 6
    block_q = block_k = _DENSE_BLOCK
    if mask is not None:
        lengths = mask.lengths
        if lengths is not None and lengths.shape[0] != q.shape[0]:
            lengths = lengths.expand(q.shape[0]).contiguous()
        arrays = mask.indptr, mask.indices, mask.tile, mask.words, mask.pattern, lengths
        block_q, block_k = mask.block_q, mask.block_k
    out, lse, _ = operator(q, k, v, *arrays, block_q, block_k, scale, *dropping)
    if place is not None and backend == "triton" and out.numel() and k.numel():
        from sparseflash.backends.triton.api import repeated

        call_cache.keep(place, repeated(q, k, v, out, arrays[:5], (block_q, block_k), scale))
    return (out, lse) if return_lse else out


# `others` is no part of what attention takes: it catches what other attentions take.
_signature = inspect.signature(attention)
attention.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[p for p in _signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
)


def _as_autocast_wants(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.get_autocast_dtype(q.device.type)
    # fp64 stays, as it does in PyTorch's own casts.
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    # Ten million calls a day fit and one does not: one quick question first, and the long answer only if it is no.
    if (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and not (q.is_nested or k.is_nested or v.is_nested)
    ):
        q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
        if (
            len(q_shape) == len(k_shape) == len(v_shape) == 4
            and q_shape[0] == k_shape[0]
            and k_shape[:3] == v_shape[:3]
            and q_shape[3] == k_shape[3] > 0
            and v_shape[3] > 0
            and k_shape[1] > 0
            and q_shape[1] % k_shape[1] == 0
            and q.dtype in _DTYPES
            and k.dtype in _DTYPES
            and v.dtype in _DTYPES
            and q.layout == k.layout == v.layout == torch.strided
            and q.device == k.device == v.device
        ):
            return
    _explain(q, k, v)


def _explain(q: Tensor, k: Tensor, v: Tensor) -> NoReturn:
    """Raises the error that says why these tensors do not fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(x).__name__}.")
        if x.is_nested:
            raise TypeError(
                f"{name} must be a plain tensor; got a nested one. Put its sequences one after the other into one, "
                "with masks.documents(lengths); or pad them, with mask.with_lengths(lengths)."
            )
        if x.layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor; got one with the layout {x.layout}. Call .to_dense().")
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape [batch, heads, tokens, head dim]; got {list(x.shape)}.")
        if x.dtype not in _DTYPES:
            raise TypeError(
                f"{name} must have a floating dtype (fp16, bf16, fp32 or fp64); got {x.dtype}. Cast it first."
            )
        if x.device != q.device:
            raise ValueError(f"q, k and v must be on one device; q is on {q.device}, {name} is on {x.device}.")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"q, k and v must have one batch size; q has {q.shape[0]}, {name} has {x.shape[0]}.")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            f"k and v must have the same heads and tokens; got {list(k.shape[1:3])} and {list(v.shape[1:3])}."
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same head dim; got {q.shape[3]} and {k.shape[3]}.")
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise ValueError(f"head dims must be at least 1; got D = {q.shape[3]} and Dv = {v.shape[3]}.")
    raise ValueError(
        f"the number of query heads must be a multiple of the number of key heads; got {q.shape[1]} and {k.shape[1]}."
    )


def _check_mask(mask: BlockMask, q: Tensor, k: Tensor) -> None:
    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"mask must be a sparseflash BlockMask or None; got {described(mask)} (BlockMask.from_dense takes boolean "
            "tensors, interop.from_flex FlexAttention's masks)."
        )
    if (mask.q_len, mask.k_len) != (q.shape[2], k.shape[2]):
        advice = ""
        if (mask.q_len, mask.k_len) == (q.shape[1], k.shape[1]):
            advice = " q looks like [batch, tokens, heads, head dim]: q.transpose(1, 2), and k and v, too."
        elif mask.q_len >= q.shape[2] and mask.k_len >= k.shape[2]:
            advice = (
                " The part of a longer sequence's mask is mask.crop(q=(start, stop), k=(start, stop)); masks.documents "
                "takes lengths, of running sums (cu_seqlens) their differences."
            )
        raise ValueError(
            f"mask must be for the lengths of q and k; it is for {mask.q_len} queries and {mask.k_len} keys, "
            f"got {q.shape[2]} and {k.shape[2]}.{advice}"
        )
    batch, heads = mask.pattern.shape
    if batch not in (1, q.shape[0]):
        raise ValueError(f"mask must be for 1 or {q.shape[0]} batch elements, as q has; it is for {batch}.")
    if heads not in (1, q.shape[1]):
        advice = ""
        if heads == k.shape[1]:
            advice = (
                f" One pattern for each key head is mask.select(heads=[h // {q.shape[1] // heads} for h in "
                f"range({q.shape[1]})])."
            )
        raise ValueError(f"mask must be for 1 or {q.shape[1]} heads, as q has; it is for {heads}.{advice}")
    if mask.lengths is not None and mask.lengths.shape[0] not in (1, q.shape[0]):
        raise ValueError(
            f"mask must have 1 or {q.shape[0]} lengths, as q has batch elements; it has {mask.lengths.shape[0]}."
        )
    if mask.indices.device != q.device:
        raise ValueError(
            f"mask must be on q's device {q.device}; it is on {mask.indices.device}. Move it once: mask.to(q.device)."
        )


def _scale(scale: float | Tensor | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, Tensor):
        raise TypeError(
            "scale must be a number, through which no gradient passes; got a tensor. A learned one: "
            "attention(q * scale, k, v, scale=1.0)."
        )
    scale = float(scale)
    if not -math.inf < scale < math.inf:  # torch.compile does not know math.isfinite of a changing number
        raise ValueError(f"scale must be finite; got {scale}.")
    return scale

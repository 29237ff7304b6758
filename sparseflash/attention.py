"""`attention()`, the public entry point: checks the inputs and picks the backend."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal, overload

import torch
from torch import Tensor

from sparseflash.backends import blockwise, reference
from sparseflash.backends.problem import Problem
from sparseflash.backends.triton import call_cache
from sparseflash.blockmask import BlockMask
from sparseflash.dropout import Dropout, seed_tensor, threshold
from sparseflash.remedies import refuse, without_others
from sparseflash.scores.change import Change, Scores, scores_of
from sparseflash.scores.sink import completed
from sparseflash.validation import check_mask, check_tensors, checked_scale, prepared_scores

BACKENDS = ("triton", "hopper", "blockwise", "reference")
Backend = Literal["triton", "hopper", "blockwise", "reference"]
# The kernels that each choice of backend asks for; "" lets the Triton backend choose.
KERNELS = {None: "", "triton": "portable", "hopper": "hopper"}
_SMALLEST_SCALE = 1e-20


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None = None, *, scale: float | None = None,
    return_lse: Literal[False] = False, dropout_p: float = 0.0, seed: int | Tensor | None = None,
    scores: Scores | Change | None = None, backend: Backend | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None = None, *, scale: float | None = None,
    return_lse: Literal[True], dropout_p: float = 0.0, seed: int | Tensor | None = None,
    scores: Scores | Change | None = None, backend: Backend | None = None,
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
    scores: Scores | Change | None = None,
    backend: Backend | None = None,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over the live scores of `mask`: `softmax(scale * q k^T, live scores only) v`.

    >>> q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
    >>> mask = BlockMask.from_function(lambda q, k: (k <= q) & (q - k < 32), 100, block=32)
    >>> attention(q, k, v, mask).shape
    torch.Size([1, 2, 100, 16])

    Args:
        q: queries `[B, Hq, Nq, D]`.
        k: keys `[B, Hkv, Nk, D]`. Hq must be a multiple of Hkv (grouped and multi-query attention): query head h reads
            key head `h // (Hq // Hkv)`.
        v: values `[B, Hkv, Nk, Dv]`. q, k and v must share one floating dtype and one device, and their last dimension
            must be contiguous. The Triton kernels copy a tensor whose rows are not aligned to 16 bytes.
        mask: the live scores; None: all. Its lengths must be Nq and Nk, its batch and head counts B and Hq, or 1. It
            must be on q's device: move it once with `mask.to(device)`. Dead keys and values, padding included, must be
            finite: 0 times NaN is NaN. For gradients, so must dead queries and the gradients of their outputs.
        scale: factor of the scores, `1 / sqrt(D)` by default.
        return_lse: also return `lse [B, Hq, Nq]`, the natural logarithm of the sum of exponentials of each query's live
            scores, in fp32 (fp64 for fp64 inputs), differentiable and without dropout; `merge_attention` merges parts
            of the keys by it.
        dropout_p: the probability that a softmax weight is set to 0, below 1; kept weights are divided by the
            probability of being kept. It is rounded to a multiple of 1/256, to at least 1/256 unless it is 0. Pass 0
            when you are not training.
        seed: an int, or one int64 in a tensor on q's device, which may change between replays of a CUDA graph. The same
            seed drops the same weights in every backend and on every device (`dropout.keep_mask` returns them). None:
            drawn from the PyTorch generator of q's device, so `torch.manual_seed` fixes it.
        scores: score modifications from `sparseflash.scores`, such as `scores.alibi(slopes) + scores.softcap(50.0)`.
            The order in which they apply is fixed (`scores.Scores`). Their tensors receive gradients. A score of -inf
            is dead, as if it were masked; the lowest finite number is a live score.
        backend: None chooses by the device. CUDA tensors run on Triton kernels, in each pass on the portable or the
            Hopper kernels, whichever are faster and support the call; `explain` says which and why. CUDA tensors that
            no kernel takes (fp64, D below 16 or above 256) raise an error. Tensors on other devices run on
            `"blockwise"`. A backend that you name runs the whole call or raises; it never falls back to another.

            - `"triton"`: the portable kernels (fp16, bf16, fp32; D and Dv from 16 to 256). The gradients of a sequence
              have the same bits whatever else is in the batch.
            - `"hopper"`: the kernels for compute capability 9.0 (fp16, bf16; D and Dv multiples of 8 up to 256; no
              dropout); `explain` says what else they refuse.
            - `"blockwise"`: PyTorch operations on the live tiles, on any device, in any floating dtype, with any D.
            - `"reference"`: PyTorch operations on the dense matrix, which define the semantics.

    Returns:
        `out [B, Hq, Nq, Dv]` in the inputs' dtype, or `(out, lse)`. A query without a live key has `out = 0` and
        `lse = -inf` (the logit of its sink, if there is one), and the gradient of that query is 0; a key without a live
        query has gradients of 0, as has its value.

    Raises:
        TypeError, ValueError: the inputs do not fit together. A keyword of another attention, such as `attn_mask`, is a
            TypeError that says what to pass instead.
        RuntimeError: the backend cannot run here (no Triton, GPU too old, CPU tensors without Triton's interpreter).

    Limits:

    - **Same bits.** Equal inputs give equal bits, forward and backward, in every backend; on a GPU `"blockwise"` does
      not promise it.
    - **fp32 on a GPU** uses TF32 if PyTorch's matrix products do (`torch.backends.cuda.matmul`). If not, every number
      is split into three bf16 pieces, whose products are as accurate as fp32. Infinite inputs then give NaN, and the
      pieces of q, k, v and the output gradient may take 6 bytes a number during the call.
    - **Large scores.** In fp16 and bf16, the backward of the Triton kernels recomputes each weight from lse in fp32,
      with a relative error of up to `score / 2^20`, below the rounding of fp16 for scores below 1,000. Scores beyond a
      million may give infinite or NaN gradients; beyond a billion, out and lse may be infinite or NaN, too.
    - **Very negative biases.** A bias may be as low as `torch.finfo(torch.float32).min`; its key then has weight 0.
      **Warning:** in fp16 and bf16, if all live keys of a query have biases below -100,000, the Triton kernels compute
      wrong gradients for the query and these keys and values, finite and without an error. Write -inf for dead keys
      instead: a query without a live key has `out = 0` and gradients of 0.
    - **Derivatives.** Gradients of gradients, forward-mode derivatives and `torch.func.grad` work with `"reference"`
      only.
    - **Autocast.** q, k and v are cast to its dtype, as for PyTorch's own attention.
    - **CUDA graphs.** Make the call once with tensors of the same shapes and strides before recording it.
    """
    if others:
        refuse(others)
    place = found = None
    try:
        kernels = KERNELS.get(backend)
    except TypeError:  # it cannot be hashed; `chosen_backend` refuses it
        kernels = None
    if kernels is not None and type(dropout_p) is float and dropout_p == 0.0:
        place = call_cache.place_of(q, k, v, mask, scale, kernels, on_gpu_only=backend is None)
        if place is not None:
            found = call_cache.repeated(place, q, k, v, mask, scores)
    if found is None:
        check_tensors(q, k, v)
        dropped = threshold(dropout_p)
        dropout = Dropout(seed_tensor(seed, q.device), dropped) if dropped else None
        found = attend(q, k, v, mask, scale, dropout, scores, backend, place)
    out, lse = found
    if not return_lse:
        return out
    sink = None if scores is None else scores_of(scores).find("sink")
    return out, lse if sink is None else completed(lse, sink.logits)


without_others(attention)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, scale: float | None, dropout: Dropout | None,
    scores: Scores | Change | None, backend: Backend | None, place: call_cache.Place | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out, lse)` of `attention`, after `check_tensors`; lse is -inf for every query without a live key."""
    q, k, v = in_one_dtype(q, k, v)
    if mask is not None:
        check_mask(mask, q, k)
    scale = checked_scale(scale, q.shape[-1])
    changes = prepared_scores(scores, q, k, mask)
    chosen, _ = chosen_backend(backend, q.device)
    if chosen == "reference":
        return reference.attention(q, k, v, mask, scale, dropout, changes)
    if chosen == "blockwise":
        if backend is None and not (16 <= q.shape[3] <= 256 and 16 <= v.shape[3] <= 256):
            _warn_of_head_dims(q.shape[3], v.shape[3])
        problem = Problem.of(mask, scale=scale, batch=q.shape[0], dropout=dropout)
        return blockwise.attention(q, k, v, problem, changes)
    from sparseflash.backends.triton import api  # imported late: the library must work without Triton

    if changes is not None and (divided := changes.find("temperature")) is not None:
        q, changes, place = divided.applied_to(q), changes.without("temperature"), None
    if scale < 0:  # the kernels take the maximum before scaling, which is right only for scale >= 0
        q, scale, place = -q, -scale, None
    if scale < _SMALLEST_SCALE:  # the Hopper kernels divide by it; bf16 has the power, and in fp16 such scores vanish
        scale, exponent = math.frexp(scale or math.ulp(0.0))
        q, place = q * 2.0**exponent, None
    problem = Problem.of(mask, scale=scale, batch=q.shape[0], dropout=dropout, kernels=KERNELS[backend])
    if not (q.numel() and k.numel()):
        place = None
    changes = changes if changes is not None and changes.changes else None
    if place is not None:
        return call_cache.first(place, q, k, v, mask, problem, changes)
    api.check_gradients(q, k, v, problem, changes)
    return api.attention(q, k, v, problem, changes)


def _warn_of_head_dims(dim: int, v_dim: int) -> None:
    global _has_warned
    if _has_warned or torch.compiler.is_compiling():
        return
    _has_warned = True
    warnings.warn(
        f"head dims D = {dim} and Dv = {v_dim} are computed here, on the CPU, but no kernel for GPUs takes them: GPU "
        "kernels need head dims from 16 to 256. Pad q, k and v with zeros and keep scale=1 / sqrt(D), or pass "
        "backend='blockwise' to silence this warning, which is given once per process.",
        stacklevel=4,
    )


_has_warned = False


def chosen_backend(backend: str | None, device: torch.device) -> tuple[str, str]:
    """The backend and the reason for it; raises ValueError for an unknown one."""
    if backend is None:
        name = "triton" if device.type == "cuda" else "blockwise"
        return name, f"the default for tensors on {device.type}"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, or None; got {backend!r}.")
    return backend, "asked for"


def in_one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs, in autocast's dtype where it is enabled. Raises TypeError unless they have one dtype then."""
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):  # PyTorch has no autocast for meta
        q, k, v = (x.to(autocast_dtype(x)) for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype; got {q.dtype}, {k.dtype} and {v.dtype}.")
    return q, k, v


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which PyTorch multiplies a tensor: autocast's where it is enabled, but for fp64 and integers."""
    kind = x.device.type
    if kind == "meta" or x.dtype == torch.float64 or not x.is_floating_point() or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)

"""The checks of `attention`'s arguments and their error messages."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import MADE_FROM, alternatives, checked_integers, dense_tensor, described
from sparseflash.scores.change import FLOATING, Scores, Sizes, scores_of


def check_dtype(dtype: Any) -> None:
    """Raises TypeError unless queries, keys and values may have this dtype."""
    if dtype not in FLOATING:
        raise TypeError(f"dtype must be fp16, bf16, fp32 or fp64; got {dtype!r}.")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises TypeError or ValueError unless these are the queries, keys and values of one attention."""
    # Nearly every call passes, so one cheap test comes first; only a failure pays for finding out which rule is broken.
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
            and q.dtype in FLOATING
            and k.dtype in FLOATING
            and v.dtype in FLOATING
            and q.layout == k.layout == v.layout == torch.strided
            and q.device == k.device == v.device
        ):
            return
    _explain(q, k, v)


def _explain(q: Tensor, k: Tensor, v: Tensor) -> NoReturn:
    for name, x in (("q", q), ("k", k), ("v", v)):
        dense_tensor(x, name)
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape [batch, heads, tokens, head dim]; got {list(x.shape)}.")
        if x.dtype not in FLOATING:
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
    if q.shape[1] == 0 or k.shape[1] == 0:
        raise ValueError(f"q and k must have at least 1 head; got {q.shape[1]} and {k.shape[1]}.")
    advice = ""
    if k.shape[1] > q.shape[1]:
        advice = " If a tensor is [batch, tokens, heads, head dim], pass its transpose(1, 2)."
    raise ValueError(
        f"the number of query heads must be a multiple of the number of key heads; got {q.shape[1]} and {k.shape[1]}."
        f"{advice}"
    )


def check_mask(mask: BlockMask, q: Tensor, k: Tensor, *, any_device: bool = False) -> None:
    """Raises TypeError or ValueError unless the mask fits the queries and keys. any_device: the devices may differ."""
    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask must be a sparseflash BlockMask or None; got {described(mask)} ({MADE_FROM}).")
    if (mask.q_len, mask.k_len) != (q.shape[2], k.shape[2]):
        advice = ""
        if (mask.q_len, mask.k_len) == (q.shape[1], k.shape[1]):
            advice = " q looks like [batch, tokens, heads, head dim]: pass q.transpose(1, 2), and k and v likewise."
        elif mask.q_len >= q.shape[2] and mask.k_len >= k.shape[2]:
            advice = (
                " For part of a longer sequence use mask.crop(q=(start, stop), k=(start, stop)); masks.documents takes "
                "lengths, so pass it the differences of running sums (cu_seqlens)."
            )
        raise ValueError(
            f"mask must be for the lengths of q and k; it is for {mask.q_len} queries and {mask.k_len} keys, "
            f"got {q.shape[2]} and {k.shape[2]}.{advice}"
        )
    check_patterns(mask, q, k)
    if mask.lengths is not None and 1 != mask.lengths.shape[1] != q.shape[0]:
        raise ValueError(
            f"mask must have lengths for {alternatives((1, q.shape[0]), 'batch element')}, as q has; it has "
            f"{mask.lengths.shape[1]}."
        )
    if mask.indices.device != q.device and not any_device:
        raise ValueError(
            f"mask must be on q's device {q.device}; it is on {mask.indices.device}. Move it once: mask.to(q.device)."
        )


def check_patterns(mask: BlockMask, q: Tensor, k: Tensor) -> None:
    """Raises ValueError unless the mask is for one batch element or all, and for one head or all."""
    batch, heads = mask.pattern.shape
    if 1 != batch != q.shape[0]:  # not `in`: see `scores.change.broadcasts`
        raise ValueError(
            f"mask must be for {alternatives((1, q.shape[0]), 'batch element')}, as q has; it is for {batch}."
        )
    if 1 != heads != q.shape[1]:
        advice = ""
        if heads == k.shape[1]:
            advice = (
                f" To use one pattern for each key head, pass mask.select(heads=[h // {q.shape[1] // heads} for h in "
                f"range({q.shape[1]})])."
            )
        raise ValueError(
            f"mask must be for {alternatives((1, q.shape[1]), 'head')}, as q has; it is for {heads}.{advice}"
        )


def prepared_scores(
    scores: object, q: Tensor, k: Tensor, mask: BlockMask | None, lengths: tuple[int, int] | None = None, *,
    any_device: bool = False,
) -> Scores | None:  # fmt: skip
    """The score modifications as backends take them, or None. Raises TypeError or ValueError if they do not fit.

    lengths: Nq and Nk of the whole problem, if `q` and `k` are a part of it. any_device: their tensors may be on
    another device than q, all on the same.
    """
    if scores is None:
        return None
    q_len, k_len = (q.shape[2], k.shape[2]) if lengths is None else lengths
    given, device = scores_of(scores), q.device
    if any_device:
        device = next((x.device for x in given.tensors()), device)
    changes = given.prepared(Sizes(q.shape[0], q.shape[1], q_len, k_len, device, mask))
    return changes if changes.changes else None


def checked_scale(scale: float | Tensor | None, head_dim: int) -> float:
    """The factor of the scores as a float, by default `1 / sqrt(head_dim)`."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, Tensor):
        raise TypeError(
            "scale must be a number, because no gradient flows through it; got a tensor. For a learned scale use "
            "attention(q * scale, k, v, scale=1.0)."
        )
    if not isinstance(scale, int | float) and (not hasattr(scale, "__float__") or getattr(scale, "ndim", 0) > 0):  # type: ignore[unreachable]
        raise TypeError(f"scale must be a number; got {scale!r}.")
    scale = float(scale)
    if not -math.inf < scale < math.inf:  # not math.isfinite, which torch.compile cannot trace for a varying number
        raise ValueError(f"scale must be finite; got {scale}.")
    return scale


def checked_lists(index: object, batch: int, kv_heads: int, q_len: int, device: torch.device) -> Tensor:
    """A list for each query and key head, as `[B, Hkv, Nq, K]`."""
    index = checked_integers(index, "index")
    shape = (1,) * (4 - index.ndim) + tuple(index.shape)
    if index.ndim not in (3, 4) or 1 != shape[0] != batch or shape[1:3] != (kv_heads, q_len):
        raise ValueError(
            f"index must have shape [{kv_heads}, {q_len}, K] or [{batch}, {kv_heads}, {q_len}, K]; got "
            f"{list(index.shape)}."
        )
    if index.device != device:
        raise ValueError(f"index must be on q's device {device}; got {index.device}.")
    return index.detach().reshape(shape).expand(batch, -1, -1, -1)

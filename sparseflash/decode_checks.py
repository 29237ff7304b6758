"""The checks of the arguments of `attention_with_cache` and `choose_pages`, and their error messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.cached import Cached
from sparseflash.blockmask.arguments import alternatives, checked_integers, checked_mask, dense_tensor, integer
from sparseflash.limits import check_tokens
from sparseflash.validation import check_tensors


def checked_choice(q: Any, k_min: Any, k_max: Any, lengths: Any) -> Tensor:
    """The lengths; raises TypeError or ValueError unless the arguments fit together."""
    for name, x in (("q", q), ("k_min", k_min), ("k_max", k_max)):
        if not dense_tensor(x, name).is_floating_point():
            raise TypeError(
                f"{name} must have a floating dtype (fp16, bf16, fp32 or fp64); got {x.dtype}. Cast it first."
            )
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}; got {x.device}.")
    if q.ndim != 4:
        raise ValueError(f"q must have shape [batch, heads, tokens, head dim]; got {list(q.shape)}.")
    batch, heads, q_len, dim = q.shape
    if heads == 0 or q_len == 0:
        raise ValueError(f"q must have at least 1 {'token' if heads else 'head'}; got shape {list(q.shape)}.")
    if k_min.shape != k_max.shape or k_min.ndim != 4 or k_min.shape[0] != batch or k_min.shape[3] != dim:
        raise ValueError(
            f"k_min and k_max must have shape [{batch}, Hkv, pages, {dim}]; got {list(k_min.shape)} and "
            f"{list(k_max.shape)}."
        )
    kv_heads = k_min.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of key heads; got {heads} and {kv_heads}."
        )
    return _sized(_integers(lengths, "lengths", 1, q), "lengths", (batch,))


def checked_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Any, block_table: Any, starts: Any, window: Any, sinks: Any,
    pages: Any, page: Any, mask: Any, *, distinct: bool = False,
) -> Cached:  # fmt: skip
    """Which keys of the cache are live; raises TypeError or ValueError unless the arguments fit together.

    distinct: no page is listed twice, and the lists are contiguous.
    """
    dense_tensor(q, "q")
    table = None if block_table is None else _integers(block_table, "block_table", 2, q)
    if table is None or not isinstance(k_cache, Tensor) or not isinstance(v_cache, Tensor):
        check_tensors(q, k_cache, v_cache)
    else:  # the number of pages is free; otherwise they are checked as caches
        caches = (k_cache, v_cache)
        if isinstance(q, Tensor) and all(
            x.ndim == q.ndim == 4 and x.layout == q.layout == torch.strided for x in caches
        ):
            if k_cache.shape[0] != v_cache.shape[0]:
                raise ValueError(
                    f"k_cache and v_cache must have equally many pages; got {k_cache.shape[0]} and {v_cache.shape[0]}."
                )
            if k_cache.shape[0] == 0:
                raise ValueError("k_cache and v_cache must have at least 1 page; got 0.")
            one = min(1, q.shape[0])
            check_tensors(q[:one], k_cache[:one], v_cache[:one])
        else:
            check_tensors(q, k_cache, v_cache)
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise TypeError(
            f"q, k_cache and v_cache must have one dtype; got {q.dtype}, {k_cache.dtype} and {v_cache.dtype}."
        )
    if torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad):
        raise ValueError(
            "q, k_cache and v_cache must not require gradients: attention_with_cache has no backward. Call it under "
            "torch.no_grad(), or train with attention and a mask."
        )
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension; got strides {list(x.stride())}.")
    batch, kv_heads = q.shape[0], k_cache.shape[1]
    lengths = _sized(_integers(lengths, "lengths", 1, q), "lengths", (batch,))
    starts = None if starts is None else _sized(_integers(starts, "starts", 1, q), "starts", (batch,))
    if table is not None:
        _sized(table, "block_table", (batch, table.shape[1]))
    if window is not None and integer(window, "window", "keys") < 1:
        raise ValueError(f"window must be at least 1 key; got {window}.")
    if integer(sinks, "sinks", "keys") < 0 or (sinks and window is None):
        raise ValueError(f"sinks must be at least 0 and go with a window; got {sinks} and window {window}.")
    if table is not None:
        if page not in (None, k_cache.shape[2]):
            raise ValueError(f"page must be the page size of the cache, {k_cache.shape[2]} tokens; got {page}.")
        page = k_cache.shape[2]
    if (page is None) != (table is None and pages is None):
        raise ValueError(
            "page must be given with pages of a contiguous cache, and only then: it is the number of tokens of a page; "
            f"got {page}."
        )
    if page is not None and integer(page, "page", "tokens") < 1:
        raise ValueError(f"page must be at least 1 token; got {page}.")
    if pages is not None:
        pages = _integers(pages, "pages", 3, q)
        _sized(pages, "pages", (batch, kv_heads, pages.shape[2]))
        if mask is not None:
            raise ValueError("pages must not be given with a mask; got both.")
        pages = pages if distinct else once(pages)
    if table is not None:
        table = table.contiguous()
    of = Cached(lengths, starts, page=page or 0, block_table=table, pages=pages, mask=mask)
    room = of.capacity(k_cache)
    if room:
        check_tokens(room, "the cache capacity of a sequence")
    if mask is not None:
        _check_mask(mask, q, kv_heads, room)
    # Kernels count in 32 bits, and tokens past the room do not exist.
    window = None if window is None else min(int(window), room + q.shape[2])
    return replace(of, window=window, sinks=min(int(sinks), room), page=min(of.page, max(room, 1)))


def _check_mask(mask: Any, q: Tensor, kv_heads: int, capacity: int) -> None:
    mask = checked_mask(mask)
    if min(mask.q_len, mask.k_len) < capacity:
        raise ValueError(
            f"mask must have at least as many queries and keys as the cache has room for, {capacity}; it has "
            f"{mask.q_len} and {mask.k_len}. Its row p is for the token at position p, as in masks.causal({capacity})."
        )
    if mask.lengths is not None:
        raise ValueError("mask must have no lengths of its own: pass them as lengths; got some.")
    if mask.pattern.shape[0] not in (1, q.shape[0]) or mask.pattern.shape[1] not in (1, kv_heads, q.shape[1]):
        raise ValueError(
            f"mask must be for {alternatives((1, q.shape[0]), 'batch element')} and "
            f"{alternatives((1, kv_heads, q.shape[1]), 'head')}; it is for {list(mask.pattern.shape)}."
        )
    if mask.device != q.device:
        raise ValueError(f"mask must be on q's device {q.device}; it is on {mask.device}. Move it once.")
    if q.shape[2] > mask.block_q:
        raise ValueError(f"q must have at most {mask.block_q} tokens, a block of the mask; got {q.shape[2]}.")


def _integers(value: Any, name: str, dimensions: int, q: Tensor) -> Tensor:
    if dimensions == 1 and isinstance(value, int | list | tuple):
        raise TypeError(
            f"{name} must be an integer tensor; got {type(value).__name__}. Keep one number for each sequence on q's "
            "device: torch.tensor([700, ...], device=q.device)."
        )
    tensor = dense_tensor(checked_integers(value, name), name)
    if tensor.ndim != dimensions:
        raise ValueError(f"{name} must have {dimensions} dimensions; got {list(tensor.shape)}.")
    if tensor.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}; got {tensor.device}.")
    return tensor


def _sized(value: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}; got {list(value.shape)}.")
    return value


def once(pages: Tensor) -> Tensor:
    """The chosen pages, each once, and -1 in place of repetitions."""
    if pages.dtype != torch.int32:  # int64 would name other pages in 32 bits
        pages = pages.long()
    pages = pages.sort(dim=-1, descending=True).values
    again = torch.nn.functional.pad(pages[..., 1:] == pages[..., :-1], (1, 0))
    return pages.masked_fill(again, -1)

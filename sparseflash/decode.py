"""Decoding: a few new tokens attend to a long cache of keys and values, contiguous or in pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from sparseflash.backends import cached
from sparseflash.backends.direct import is_plain_call
from sparseflash.backends.triton import native
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import integer
from sparseflash.blockmask.cache import BoundedDict
from sparseflash.decode_checks import checked_cache, checked_choice, once
from sparseflash.remedies import refuse, without_others
from sparseflash.scores.change import Change, Scores, Sizes, scores_of
from sparseflash.scores.grids import Grid
from sparseflash.scores.relative import Codes
from sparseflash.validation import checked_scale

BACKENDS = ("triton", "reference")
Backend = Literal["triton", "reference"]
# Kinds of score modifications that the kernel applies; distance is alibi and log_decay.
CHANGES = ("temperature", "softcap", "distance", "relative", "key_bias", "sink")
FEW = 16  # the most new tokens that `attention_with_cache` is meant for
_calls = BoundedDict(64)
_INTEGERS = {int, type(None)}  # 1.0 equals 1, but is refused


@overload
def attention_with_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, block_table: Tensor | None = None,
    starts: Tensor | None = None, window: int | None = None, sinks: int = 0, pages: Tensor | None = None,
    page: int | None = None, mask: BlockMask | None = None, scores: Scores | Change | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False, splits: int | None = None, backend: Backend | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def attention_with_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, block_table: Tensor | None = None,
    starts: Tensor | None = None, window: int | None = None, sinks: int = 0, pages: Tensor | None = None,
    page: int | None = None, mask: BlockMask | None = None, scores: Scores | Change | None = None,
    scale: float | None = None,
    return_lse: Literal[True], splits: int | None = None, backend: Backend | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    starts: Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
    pages: Tensor | None = None,
    page: int | None = None,
    mask: BlockMask | None = None,
    scores: Scores | Change | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    splits: int | None = None,
    backend: Backend | None = None,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of a few new tokens over the keys and values of a cache, causal, for inference.

    >>> q = torch.randn(2, 4, 1, 16)  # one new token in each of two sequences, four query heads
    >>> k_cache, v_cache = torch.randn(2, 2, 2, 1024, 16)  # two key heads, room for 1024 tokens
    >>> lengths = torch.tensor([700, 12])  # tokens in the cache, the new ones included
    >>> attention_with_cache(q, k_cache, v_cache, lengths).shape
    torch.Size([2, 4, 1, 16])

    The last 256 tokens, and the first 4 (a streaming model):

    >>> out = attention_with_cache(q, k_cache, v_cache, lengths, window=256, sinks=4)

    In pages of 64 tokens, as in vLLM and FlashInfer. `block_table` lists the pages of each sequence:

    >>> k_pages, v_pages = (x.unflatten(2, (16, 64)).transpose(1, 2).flatten(0, 1) for x in (k_cache, v_cache))
    >>> block_table = torch.arange(32).view(2, 16)
    >>> paged = attention_with_cache(q, k_pages, v_pages, lengths, block_table=block_table, window=256, sinks=4)
    >>> torch.equal(out, paged)
    True

    With `n = lengths[b]`, query i of Nq is token `p = n - Nq + i` of its sequence. Key t is live iff

        starts[b] <= t <= p   and   (t > p - window  or  t < starts[b] + sinks)        (the latter if window is given)
        and   t // page is in pages[b, h]   (if given)   and   score (p, t) of the mask is live   (if given)

    Args:
        q: queries `[B, Hq, Nq, D]`, meant for Nq from 1 to 16; fp16, bf16 or fp32 on a GPU.
        k_cache: keys `[B, Hkv, S, D]`, with room for S tokens, Hq a multiple of Hkv; or, with `block_table`, all pages,
            `[P, Hkv, page, D]`. The last dimension must be contiguous; pass a cache `[B, S, Hkv, D]` or
            `[P, page, Hkv, D]` by `transpose(1, 2)`. The new keys must have been written. Keys past the length, before
            `starts` or in pages that are not chosen need not be finite.
        v_cache: values `[B, Hkv, S, Dv]` or `[P, Hkv, page, Dv]`.
        lengths: tokens of each sequence, the new ones included, integers `[B]` on q's device. A length beyond the room
            counts as the room. A sequence of length 0 gives 0.
        block_table: integers `[B, n]`: page `t // page` of sequence b is `k_cache[block_table[b, t // page]]`. Entries
            past the length are not read.
        starts: the first live token of each sequence, integers `[B]`, for rows that are padded on the left.
        window: the number of keys that a query sees, itself included.
        sinks: the number of first keys that every query sees besides its window.
        pages: chosen pages of each sequence and key head, integers `[B, Hkv, K]`, in any order, numbered within the
            sequence; repetitions and numbers of no page, such as -1, are ignored. `choose_pages` makes a choice.
            Include the newest page.
        page: tokens of a chosen page; only for a contiguous cache.
        mask: a mask with at least as many queries and keys as the cache has room for, on q's device: the query at
            position p sees the live keys of row p. Its head count: 1, Hkv or Hq.
        scores: score modifications from `sparseflash.scores`: temperature, softcap, alibi, log_decay, relative,
            key_bias and sink. The distance of query i and key t is `p - t`. A `key_bias` is `[B or 1, Hq or 1, S]`, S
            being the room for tokens of a sequence; a `bias [B or 1, Hq or 1, 1, S]` for one new token is the same.
        scale: factor of the scores, `1 / sqrt(D)` by default.
        return_lse: also return `lse [B, Hq, Nq]`, natural, fp32.
        splits: the number of programs that share the keys of a sequence. By default 16, or another number up to 128 if
            that gives each program 128 to 1,024 keys of the capacity (or window, or chosen pages). The default does not
            depend on the batch, so a sequence has the same bits in a batch as alone.
        backend: `"triton"`, the default for CUDA tensors, or `"reference"`, plain PyTorch, for all others.

    Returns:
        `out [B, Hq, Nq, Dv]`, or `(out, lse)`. A query without a live key has `out = 0` and `lse = -inf`
        (the logit of its sink, if there is one).

    Raises:
        TypeError, ValueError: the arguments do not fit together.
        RuntimeError: the backend cannot run here.

    Launches depend on shapes alone. So after one call like it, a CUDA graph can record the call and replay it while
    `lengths` (in place), the cache and the choices change. There is no backward and no dropout: use `attention` with a
    mask.
    """
    if others:
        refuse(others, "attention_with_cache", _REMEDIES)
    out, lse = _attended(
        q, k_cache, v_cache, lengths, block_table, starts, window, sinks, pages, page, mask, scores, scale, splits,
        backend,
    )  # fmt: skip
    return (out, lse) if return_lse else out


_REMEDIES = {
    "dropout_p": "it is for inference. To train, use attention with a mask",
    "alibi_slopes": "pass scores=scores.alibi(alibi_slopes)",
    "softcap": "pass scores=scores.softcap(softcap)",
    "cache_seqlens": "pass lengths=, which count the new tokens, too",
    "causal": "it is always causal",
    "k": "write the new keys into k_cache before the call",
    "num_splits": "it is called splits",
    "page_table": "it is called block_table",
    "sink": "pass sinks=, the number of first keys beside a window, or scores=scores.sink(logits) for a learned sink",
    "softmax_scale": "it is called scale",
    "v": "write the new values into v_cache before the call",
    "window_size": "pass window=, the number of keys that a query sees, itself included",
}
without_others(attention_with_cache)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention_to_pages(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, pages: Tensor, *, page: int, scale: float | None,
    backend: Backend | None,
) -> Tensor:  # fmt: skip
    """`attention_with_cache` for contiguous lists of pages without repetitions, for which it would look."""
    return _attended(
        q, k_cache, v_cache, lengths, None, None, None, 0, pages, page, None, None, scale, None, backend, distinct=True
    )[0]  # fmt: skip


def _attended(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor | None, starts: Tensor | None,
    window: int | None, sinks: int, pages: Tensor | None, page: int | None, mask: BlockMask | None,
    scores: Scores | Change | None, scale: float | None, splits: int | None, backend: Backend | None,
    distinct: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tensors, numbers = (q, k_cache, v_cache, lengths, starts, block_table, pages), (window, sinks, page, splits)
    # The layout of a call does not show whether a mask has changed.
    key = _key(tensors, numbers, scale, backend) if mask is None else None
    call = None if key is None or scores is not None else _calls.get(key)
    if call is not None:
        found: tuple[Tensor, Tensor] = call(*tensors[:6], pages if pages is None or distinct else once(pages))
        return found
    of = checked_cache(
        q, k_cache, v_cache, lengths, block_table, starts, window, sinks, pages, page, mask, distinct=distinct
    )  # fmt: skip
    if scores is not None:
        of = replace(of, changes=_prepared(scores_of(scores), q, of.capacity(k_cache)))
    scale = checked_scale(scale, q.shape[-1])
    if splits is not None and integer(splits, "splits", "") < 1:
        raise ValueError(f"splits must be at least 1; got {splits}.")
    if backend is None:
        backend = "triton" if q.device.type == "cuda" else "reference"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, or None; got {backend!r}.")
    if backend == "reference":
        return cached.attention(q, k_cache, v_cache, of, scale)
    if q.dtype == torch.float64:
        raise TypeError("q must be fp16, bf16 or fp32 for the triton backend; got fp64: use backend='reference'.")
    from sparseflash.backends.triton.decode import api  # imported late: the library must work without Triton

    changes = of.changes
    if changes is not None and (divided := changes.find("temperature")) is not None:
        q, changes, key = divided.applied_to(q), changes.without("temperature"), None
        of = replace(of, changes=changes if changes.changes else None)
    elif changes is not None and key is not None:
        key = *key, changes.described(), *((x.shape, x.stride(), x.dtype) for x in changes.tensors())
        call = _calls.get(key)
    q = q if q.stride(-1) == 1 else q.contiguous()
    if call is None:
        if scale < 0:
            q, scale = -q, -scale
        call = api.Call(q, k_cache, v_cache, of, scale, splits)
        if key is not None:
            _calls[key] = call
    return call(q, k_cache, v_cache, of.lengths, of.starts, of.block_table, of.pages, of.changes)


def _prepared(changes: Scores, q: Tensor, room: int) -> Scores | None:
    """The modifications for queries at the end of a cache with this room, as `Cached` has them."""
    for change in changes.changes:
        if isinstance(change, Grid):
            _refuse_change("relative_2d or relative_3d")
        if change.kind == "tile_bias":
            _refuse_change("tile_bias")
    if torch.is_grad_enabled() and any(x.requires_grad for x in changes.tensors()):
        raise ValueError(
            "the tensors of scores must not require gradients: attention_with_cache has no backward. Call it under "
            "torch.no_grad(), or train with attention and a mask."
        )
    found: list[Change] = []
    for change in changes.prepared(Sizes(q.shape[0], q.shape[1], q.shape[2], room, q.device)).changes:
        if change.kind not in CHANGES:
            _refuse_change(change.kind)
        if isinstance(change, Codes):  # code d + Nq - 1 is of the distance d
            by_distance = change.buckets[max(q.shape[2] - 1, 0) :]
            change = replace(
                change, buckets=by_distance, q_codes=change.k_codes, k_codes=change.k_codes, until=change.until[:0]
            )
        found.append(change)
    return Scores(tuple(found)) if found else None


def _refuse_change(kind: str) -> NoReturn:
    raise ValueError(
        "scores with a cache must be of temperature, softcap, alibi, log_decay, relative, key_bias and sink; got "
        f"{kind}. Use attention with the keys of the cache and a mask; for one new token a bias is a key_bias."
    )


def _key(tensors: tuple[Any, ...], numbers: tuple[Any, ...], scale: Any, backend: str | None) -> Any:
    """All that the checks and launches of a plain half-precision call depend on; else None."""
    q, table = tensors[0], tensors[5]
    if not (isinstance(q, Tensor) and q.dtype in (torch.float16, torch.bfloat16) and is_plain_call()):
        return None
    if not (backend == "triton" or (backend is None and q.is_cuda)) or not _INTEGERS.issuperset(map(type, numbers)):
        return None
    if not (scale is None or (type(scale) is float and scale >= 0)):
        return None
    given = [x for x in tensors if x is not None]
    layouts = native.module().layouts(*given)
    if layouts is None or q.ndim == 0:  # not plain, or without memory of its own: the checks refuse some of these
        return None
    if torch.is_grad_enabled() and any([x.requires_grad for x in given]):
        return None
    if q.stride(-1) != 1 or not (table is None or table.is_contiguous()):  # which are copied first
        return None
    return layouts, *(x is None for x in tensors[4:]), *numbers, scale


def choose_pages(q: Tensor, k_min: Tensor, k_max: Tensor, lengths: Tensor, *, k: int, page: int) -> Tensor:
    """The k pages of each key head that may hold the highest scores, the newest page among them: int32 `[B, Hkv, k]`.

    >>> k_cache = torch.eye(256)[None, None]
    >>> of_pages = k_cache.unflatten(2, (-1, 32))  # [B, Hkv, n, 32, D]
    >>> q = k_cache[:, :, 70:71]  # looks for token 70, in page 2
    >>> choose_pages(q, of_pages.amin(3), of_pages.amax(3), torch.tensor([256]), k=2, page=32)[0, 0].tolist()
    [7, 2]

    A page of keys between `k_min` and `k_max`, in every dimension, cannot have a score above

        sum over d of max(q_d * k_min_d, q_d * k_max_d)

    and the pages with the highest bound are chosen, over the heads of a group and several queries.

    Args:
        q: queries `[B, Hq, Nq, D]`, Hq a multiple of Hkv.
        k_min, k_max: `[B, Hkv, n, D]`, of every page of a sequence, kept up to date as tokens are added.
        lengths: tokens of each sequence, the new ones included, integers `[B]`. A length beyond the n pages counts as
            their room.
        k: the number of pages. -1 stands in place of pages past the length, and of pages past n if k is larger.
        page: tokens of a page.

    The host does not wait for the device.

    Raises TypeError or ValueError if the arguments do not fit together.

    Source: Quest (Tang et al., 2024).
    """
    lengths = checked_choice(q, k_min, k_max, lengths)
    k, page = integer(k, "k", "pages"), integer(page, "page", "tokens")
    if k < 1:
        raise ValueError(f"k must be at least 1 page; got {k}.")
    if page < 1:
        raise ValueError(f"page must be at least 1 token; got {page}.")
    (batch, heads, q_len, dim), (kv_heads, count) = q.shape, k_min.shape[1:3]
    grouped = q.float().reshape(batch, kv_heads, heads // kv_heads * q_len, dim)  # [B, Hkv, G * Nq, D]
    bound = grouped.clamp(min=0) @ k_max.float().mT + grouped.clamp(max=0) @ k_min.float().mT
    newest = torch.div(lengths.long() - 1, page, rounding_mode="floor").clamp(max=count - 1).view(-1, 1, 1)
    number = torch.arange(count, device=q.device)
    score = bound.amax(2).masked_fill(number == newest, torch.inf).masked_fill(number > newest, -torch.inf)
    best = score.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    chosen = best.masked_fill(best > newest, -1).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[-1]), value=-1)

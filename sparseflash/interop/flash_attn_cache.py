"""FlashAttention's function for decoding, `flash_attn_with_kvcache`, with its arguments and layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflash import scores
from sparseflash.decode import Backend, attention_with_cache
from sparseflash.interop.alibi import score_changes
from sparseflash.interop.flash_attn_varlen import sides
from sparseflash.interop.tokens_first import heads_first, refuse_unless


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, *, learnable_sink: Tensor | None = None, backend: Backend | None = None,
) -> Any:  # fmt: skip
    """`flash_attn.flash_attn_with_kvcache`, computed by `attention_with_cache`.

    >>> k_cache, v_cache = torch.zeros(2, 2, 1024, 2, 16)  # room for 1024 tokens of two sequences, two key heads
    >>> q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
    >>> filled = torch.tensor([700, 12], dtype=torch.int32)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=filled, causal=True).shape
    torch.Size([2, 1, 4, 16])
    >>> torch.equal(k_cache[1, 12], k[1, 0])  # the new keys were written behind the old ones
    True

    Args:
        q: new queries, `[B, Nq, Hq, D]`.
        k_cache, v_cache: `[B, S, Hkv, D]`, or all pages, `[P, page, Hkv, D]`, with `block_table`.
        k, v: new keys and values, `[B, n, Hkv, D]`, which are written into the cache at positions `cache_seqlens` to
            `cache_seqlens + n - 1`. The room is not checked, which would make the host wait.
        rotary_cos, rotary_sin: `[positions, R / 2]`: the first R features of k and of q are rotated by their positions,
            which begin at `cache_seqlens`; without `causal` and a window all queries are at `cache_seqlens`. Needs k.
        rotary_interleaved: features 2i and 2i + 1 are a pair (GPT-J); otherwise i and i + R / 2 (GPT-NeoX, Llama).
        cache_seqlens: tokens in the cache, without the new ones; an int, or integers `[B]`; None: it is full.
        cache_batch_idx: the rows of the cache that the sequences have, integers `[B]`.
        cache_leftpad: the first live token of each sequence, integers `[B]`.
        block_table: the pages of each sequence, integers `[B, n]`.
        causal, window_size: as for `flash_attn_func`. Several queries need `causal`, a right side of 0, or no window.
        num_splits: 0 for the default, which does not depend on the batch.
        softcap: 0 for none. alibi_slopes: `[Hq]`. learnable_sink: logits `[Hq]`, as in FlashAttention-4.
        softmax_scale, return_softmax_lse, backend: as `scale`, `return_lse` and `backend` of `attention_with_cache`.
    """
    refuse_unless((k is None) == (v is None), "k and v", "given together", "one of them")
    refuse_unless((rotary_cos is None) == (rotary_sin is None), "rotary_cos and rotary_sin", "given together", "one")
    refuse_unless(rotary_cos is None or k is not None, "k and v", "given with rotary_cos, which rotates them", None)
    refuse_unless(cache_batch_idx is None or block_table is None, "cache_batch_idx", "None with a block_table", "both")
    queries, keys, values = heads_first(q, "q"), heads_first(k_cache, "k_cache"), heads_first(v_cache, "v_cache")
    batch, heads, q_len, dim = queries.shape
    left, right = sides(window_size, causal)
    if cache_batch_idx is not None:
        block_table = cache_batch_idx[:, None]
    room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    refuse_unless(k is None or cache_seqlens is not None, "cache_seqlens", "given with new keys", None)
    filled = room if cache_seqlens is None else cache_seqlens
    lengths = torch.full((batch,), filled, device=q.device) if isinstance(filled, int) else filled
    if rotary_cos is not None and rotary_sin is not None and k is not None:
        moves = not (left is right is None)
        queries = rotated(queries, rotary_cos, rotary_sin, lengths, rotary_interleaved, moves=moves)
        k = rotated(heads_first(k, "k"), rotary_cos, rotary_sin, lengths, rotary_interleaved).transpose(1, 2)
    if k is not None and v is not None:
        _write(k_cache, k, lengths, block_table)
        _write(v_cache, v, lengths, block_table)
        lengths = lengths + k.shape[1]
    together = q_len > 1 and right != 0
    if together:
        refuse_unless(
            left is None and (right is None or right >= q_len - 1), "window_size",
            "(-1, -1) or end at the query, (left, 0), for several queries without causal", window_size,
        )  # fmt: skip
        # Queries that see the same keys are like more heads of one query.
        kv_heads = keys.shape[1]
        refuse_unless(heads % kv_heads == 0, "the number of query heads", f"a multiple of {kv_heads}", heads)
        queries = queries.reshape(batch, heads * q_len, 1, dim)
        refuse_unless(
            alibi_slopes is None, "alibi_slopes", "None for several queries without causal", "a tensor of slopes"
        )
        if learnable_sink is not None:
            learnable_sink = learnable_sink.repeat_interleave(q_len)
    changes = score_changes(softcap, learnable_sink)
    if alibi_slopes is not None:
        refuse_unless(
            alibi_slopes.ndim == 1, "alibi_slopes",
            "[Hq] with a cache; call once for each sequence that has slopes of its own", list(alibi_slopes.shape),
        )  # fmt: skip
        changes = changes + scores.alibi(alibi_slopes)
    out, lse = attention_with_cache(
        queries, keys, values, lengths, block_table=block_table, starts=cache_leftpad,
        window=None if left is None else left + 1, scale=softmax_scale, return_lse=True, splits=num_splits or None,
        scores=changes if changes.changes else None, backend=backend,
    )  # fmt: skip
    out, lse = out.reshape(batch, heads, q_len, -1).transpose(1, 2), lse.reshape(batch, heads, q_len)
    return (out, lse) if return_softmax_lse else out


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor, first: Tensor, interleaved: bool, *, moves: bool = True
) -> Tensor:  # fmt: skip
    """x `[B, H, n, D]` with its first features rotated by the positions `first [B]`, `first + 1`, ...

    >>> x, angle = torch.ones(1, 1, 2, 3), torch.arange(5.0)[:, None]
    >>> rotated(x, angle.cos(), angle.sin(), torch.tensor([0]), True)[0, 0, 1]
    tensor([-0.3012,  1.3818,  1.0000])

    cos, sin: `[positions, R / 2]`; moves: False for all at `first`.
    """
    half = cos.shape[-1]
    if cos.ndim != 2 or cos.shape != sin.shape or 2 * half > x.shape[-1]:
        raise ValueError(
            f"rotary_cos and rotary_sin must have shape [positions, half of the rotated features], at most "
            f"{x.shape[-1] // 2} of them; got {list(cos.shape)} and {list(sin.shape)}."
        )
    at = first.long()[:, None] + (torch.arange(x.shape[2], device=x.device) if moves else 0)
    wide = torch.promote_types(x.dtype, torch.float32)
    cosine, sine = (y.to(wide)[at][:, None] for y in (cos, sin))  # [B, 1, n, R / 2]
    turning, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    one, two = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    pair = one * cosine - two * sine, one * sine + two * cosine
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def _write(cache: Tensor, new: Tensor, lengths: Tensor, block_table: Tensor | None) -> None:
    at = lengths.long()[:, None] + torch.arange(new.shape[1], device=new.device)  # [B, n]
    if block_table is None:
        rows = torch.arange(len(lengths), device=new.device)[:, None]
    else:
        page = cache.shape[1]
        rows, at = block_table.long().gather(1, at // page), at % page
    with torch.no_grad():
        cache[rows, at] = new

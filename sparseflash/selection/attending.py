"""Attention of a layer's queries to chosen blocks, to near keys and to compressed keys, with a cache or without."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparseflash.attention import Backend, attention, in_one_dtype
from sparseflash.backends.chosen_blocks import block_attention, serves
from sparseflash.decode import Backend as Decoder
from sparseflash.decode import attention_to_pages, attention_with_cache
from sparseflash.grouped import selected_attention
from sparseflash.masks.chosen_keys import selected_keys
from sparseflash.selected_tokens import token_attention
from sparseflash.selection.cache import ended_of
from sparseflash.selection.choice import tokens_of
from sparseflash.selection.frame import Frame
from sparseflash.selection.runs import near_keys, past_blocks

_ROWS = 16  # with this many heads a group, tiles of one query waste nothing
# The keys for each gathered token and head of a group from which on gathering is faster than a mask. On an H200, a
# forward that gathers takes 66 ms and one with a mask 102 ms at D = 256 with 12 heads a group, 64K tokens and 2,052
# chosen ones.
_KEYS = 245
_FEW = 2  # a query's share of the keys, inverted, from which on its blocks are few


class How(NamedTuple):
    """The factor of the scores, and the backend, of all attention of a layer."""

    scale: float | None
    backend: Backend | None

    @property
    def decoder(self) -> Decoder | None:
        """The backend for one token after a cache; None also for a backend that has no such kernels."""
        return self.backend if self.backend == "triton" or self.backend == "reference" else None

    @property
    def decodes(self) -> bool:
        return self.backend is None or self.decoder is not None


def over_chosen(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, frame: Frame, how: How, *, span: int
) -> Tensor:  # fmt: skip
    """Attention to the blocks `index [B, H, Nq, K]`, where H is 1, the key heads or the query heads."""
    heads, kv_heads = q.shape[1], k.shape[1]
    of_keys = index.expand(-1, kv_heads, -1, -1) if index.shape[1] == 1 else index
    if frame.lengths is not None:
        return _with_cache(q, k, v, of_keys, frame, how, span)
    q, k, v = in_one_dtype(q, k[:, :, : frame.k_len], v[:, :, : frame.k_len])
    if of_keys.shape[1] == kv_heads and heads // kv_heads >= _ROWS and 16 <= span <= 256:
        return selected_attention(q, k, v, of_keys, span=span, scale=how.scale, backend=how.backend)
    if k.shape[2] >= _FEW * index.shape[3] * span and serves(q, k, v, of_keys, span, how.backend):
        scale = q.shape[3] ** -0.5 if how.scale is None else how.scale
        return block_attention(q, k, v, of_keys, span=span, causal=True, scale=scale)[0]
    if of_keys.shape[1] == kv_heads and span < 16 and how.decodes and _are_few(q, k, index, span):
        tokens = tokens_of(of_keys, span)  # for kernels that gather single tokens
        out: Tensor = token_attention(q, k, v, tokens, scale=how.scale, backend=how.decoder)
        return out
    mask = selected_keys(
        index, k_len=frame.k_len, block=64 if 16 <= span < 128 else 128, span=span, causal=True,
        group=heads // index.shape[1],
    )  # fmt: skip
    return attention(q, k, v, mask, scale=how.scale, backend=how.backend)


def _are_few(q: Tensor, k: Tensor, index: Tensor, span: int) -> bool:
    """Whether a query's single tokens are so few that they are gathered; with a mask nearly all keys are multiplied."""
    return k.shape[2] * (q.shape[1] // k.shape[1]) > _KEYS * index.shape[3] * span


def over_latent(
    q: Tensor, k: Tensor, index: Tensor, frame: Frame, how: How, *, v_dim: int
) -> Tensor:  # fmt: skip
    """Attention to the tokens `index [B, 1, Nq, K]`, whose keys hold their values."""
    out: Tensor = token_attention(
        q, k[:, :, : frame.k_len], None, index, v_dim=v_dim, scale=how.scale, backend=how.decoder
    )
    return out


def over_near(
    q: Tensor, k: Tensor, v: Tensor, frame: Frame, how: How, *, window: int
) -> Tensor:  # fmt: skip
    """Attention to the last `window` keys of the document, the query's own included."""
    if frame.lengths is not None:
        out: Tensor = attention_with_cache(q, k, v, frame.lengths, window=window, scale=how.scale, backend=how.decoder)
        return out
    k, v = k[:, :, : frame.k_len], v[:, :, : frame.k_len]
    return attention(q, k, v, near_keys(frame, window), scale=how.scale, backend=how.backend)


def over_past(
    q: Tensor, k: Tensor, v: Tensor, frame: Frame, how: How, *, blocks: int, span: int, step: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention to the compressed keys of all blocks of a query's document that have ended, and its lse."""
    if frame.lengths is not None:
        found: tuple[Tensor, Tensor] = attention_with_cache(
            q, k, v, ended_of(frame.lengths, span, step), scale=how.scale, return_lse=True, backend=how.decoder
        )
        return found
    mask = past_blocks(frame, blocks, span, step) if blocks else None
    k, v = k[:, :, :blocks], v[:, :, :blocks]
    return attention(q, k, v, mask, scale=how.scale, return_lse=True, backend=how.backend)


def _with_cache(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, frame: Frame, how: How, span: int
) -> Tensor:  # fmt: skip
    assert frame.lengths is not None
    (batch, kv_heads), lists, lengths = k.shape[:2], index.shape[1], frame.lengths
    if lists > kv_heads:  # each list has a key head of its own, which is the same memory
        turns = lists // kv_heads
        q, index = (x.reshape(batch * kv_heads, -1, *x.shape[2:]) for x in (q, index))
        k, v = (x.flatten(0, 1).unsqueeze(1).expand(-1, turns, -1, -1) for x in (k, v))
        lengths = lengths.unsqueeze(1).expand(-1, kv_heads).flatten()
    out: Tensor = attention_to_pages(
        q, k, v, lengths, index.squeeze(2).contiguous(), page=span, scale=how.scale, backend=how.decoder
    )
    return out.view(batch, -1, *out.shape[2:])

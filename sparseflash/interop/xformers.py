"""xformers' `memory_efficient_attention`, with its arguments, layouts and classes of `attn_bias`."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash.attention import Backend, attention
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, dense_tensor
from sparseflash.blockmask.cache import BoundedDict, once
from sparseflash.blockmask.ops.place import place
from sparseflash.interop.flash_attn_varlen import window
from sparseflash.interop.tokens_first import refuse_unless
from sparseflash.scaled_dot_product import live_and_bias

_masks = BoundedDict(32)


class _Kind(NamedTuple):
    corner: str  # which corner the diagonal starts from
    limit: str  # "none", "causal", "window" (_window_size) or "sides" (window_left, window_right)
    has_blocks: bool


_KINDS = {
    "LowerTriangularMask": _Kind("top", "causal", False),
    "LowerTriangularMaskWithTensorBias": _Kind("top", "causal", False),
    "LowerTriangularFromBottomRightMask": _Kind("bottom", "causal", False),
    "LowerTriangularFromBottomRightLocalAttentionMask": _Kind("bottom", "window", False),
    "LocalAttentionFromBottomRightMask": _Kind("bottom", "sides", False),
    "BlockDiagonalMask": _Kind("top", "none", True),
    "BlockDiagonalCausalMask": _Kind("top", "causal", True),
    "BlockDiagonalCausalFromBottomRightMask": _Kind("bottom", "causal", True),
    "BlockDiagonalCausalLocalAttentionMask": _Kind("top", "window", True),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _Kind("bottom", "window", True),
    "BlockDiagonalPaddedKeysMask": _Kind("top", "none", True),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": _Kind("bottom", "causal", True),
    "BlockDiagonalLocalAttentionPaddedKeysMask": _Kind("bottom", "sides", True),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _Kind("bottom", "window", True),
    "BlockDiagonalGappyKeysMask": _Kind("top", "none", True),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": _Kind("bottom", "causal", True),
}


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None, *,
    op: Any = None, output_dtype: torch.dtype | None = None, block: Block = 128, backend: Backend | None = None,
) -> Tensor:  # fmt: skip
    """`xformers.ops.memory_efficient_attention`, computed by `attention`.

    >>> q, k, v = torch.randn(3, 2, 100, 4, 16)  # [B, M, H, K]
    >>> memory_efficient_attention(q, k, v).shape
    torch.Size([2, 100, 4, 16])

    Args:
        query, key, value: `[B, M, H, K]`; `[B, M, K]` for one head; `[B, M, G, H, K]` for G groups of H heads, where
            keys that were expanded over H are read once a group.
        attn_bias: an `AttentionBias` of xformers, which becomes a mask, or a floating tensor `[B, H, Mq, Mk]` that is
            added to the scores, in which -inf is dead. xformers itself is not needed.
        p, scale: dropout and the factor of scores, as `dropout_p` and `scale` of `attention`.
        block, backend: as for `sdpa`.

    A query without a live key gives 0; xformers gives NaN. Masks are kept by the bias's values. A tensor is converted
    at every call; see `sdpa`. `op` changes nothing: the kernels follow from the GPU and the mask. `output_dtype` and
    biases with pages are refused.
    """
    del op
    refuse_unless(output_dtype in (None, query.dtype), "output_dtype", "None or query's dtype", output_dtype)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if dense_tensor(x, name).ndim not in (3, 4, 5) or x.ndim != query.ndim:
            raise ValueError(
                f"{name} must have shape [B, M, H, K], [B, M, K] or [B, M, G, H, K], as the others have; got "
                f"{list(x.shape)}."
            )
    if query.ndim == 5 and key.stride(3) == value.stride(3) == 0:
        key, value = key[:, :, :, :1], value[:, :, :, :1]
    q, k, v = _heads(query), _heads(key), _heads(value)
    mask, added = _mask_and_bias(attn_bias, q, k, query.ndim, block)
    out = attention(q, k, v, mask, scale=scale, dropout_p=p, scores=added, backend=backend).transpose(1, 2)
    if query.ndim == 3:
        return out.squeeze(2)
    return out if query.ndim == 4 else out.unflatten(2, query.shape[2:4])


def _heads(x: Tensor) -> Tensor:
    """`[B, H, M, K]`."""
    x = x.unsqueeze(2) if x.ndim == 3 else x.flatten(2, 3) if x.ndim == 5 else x
    return x.transpose(1, 2)


def _mask_and_bias(attn_bias: Any, q: Tensor, k: Tensor, ndim: int, block: Block) -> tuple[BlockMask | None, Any]:
    if attn_bias is None:
        return None, None
    names = [each.__name__ for each in type(attn_bias).__mro__]
    if isinstance(attn_bias, Tensor) and "AttentionBias" not in names:
        return _of_tensor(attn_bias, q, k, ndim, block)
    mask = mask_of_bias(attn_bias, q.shape[2], k.shape[2], block, q.device)
    if names[0] != "LowerTriangularMaskWithTensorBias":
        return mask, None
    tensor = getattr(attn_bias, "_subtensor" if isinstance(attn_bias, Tensor) else "_bias")
    live, added = _of_tensor(tensor, q, k, ndim, block)
    return (mask if live is None else mask & live), added


def _of_tensor(bias: Tensor, q: Tensor, k: Tensor, ndim: int, block: Block) -> tuple[BlockMask | None, Any]:
    if bias.dtype == torch.bool:
        raise TypeError("attn_bias must be floating, 0 and -inf for a mask; got torch.bool.")
    if ndim == 3 and bias.ndim == 3:
        bias = bias.unsqueeze(1)
    elif bias.ndim == 5:
        bias = bias.flatten(1, 2)
    found: tuple[BlockMask | None, Any] = live_and_bias(
        bias, q.shape[2], k.shape[2], block, "attn_bias", device=q.device
    )
    return found


def mask_of_bias(
    attn_bias: Any, q_len: int, k_len: int, block: Block = 128, device: torch.device | str = "cpu"
) -> BlockMask:
    """The mask of an `AttentionBias` of xformers.

    Raises TypeError for another object, or one with pages.
    """
    names = [each.__name__ for each in type(attn_bias).__mro__]
    if names[0] not in _KINDS:
        paged = " Pages go to attention_with_cache(..., block_table=)." if "Paged" in names[0] else ""
        raise TypeError(
            f"attn_bias must be None, a tensor or one of xformers' {', '.join(_KINDS)}; got {names[0]}.{paged}"
        )
    kind = _KINDS[names[0]]
    blocks = [(0, q_len, 0, k_len)]
    if kind.has_blocks:
        blocks = _blocks(attn_bias, q_len, k_len)
    left, right = _limits(attn_bias, kind)
    key = kind, tuple(blocks), q_len, k_len, left, right, block, torch.device(device)
    at_bottom = kind.corner == "bottom"
    return once(_masks, key, lambda: _made(blocks, q_len, k_len, at_bottom, left, right, block).to(device))


def _limits(attn_bias: Any, kind: _Kind) -> tuple[int | None, int | None]:
    """How many keys a query sees before and after its own, None for all."""
    if kind.limit == "sides":
        return attn_bias.window_left, attn_bias.window_right
    if kind.limit == "window":
        return attn_bias._window_size - 1, 0
    return None, 0 if kind.limit == "causal" else None


def _blocks(attn_bias: Any, q_len: int, k_len: int) -> list[tuple[int, int, int, int]]:
    q_starts, k_starts = attn_bias.q_seqinfo.seqstart_py, attn_bias.k_seqinfo.seqstart_py
    if (q_starts[-1], k_starts[-1]) != (q_len, k_len):
        raise ValueError(
            f"attn_bias must be of {q_len} queries and {k_len} keys; got {q_starts[-1]} and {k_starts[-1]}."
        )
    k_sizes = getattr(attn_bias.k_seqinfo, "seqlen_py", None)
    if k_sizes is None:
        k_sizes = [stop - start for start, stop in itertools.pairwise(k_starts)]
    q_sizes = [stop - start for start, stop in itertools.pairwise(q_starts)]
    return list(zip(q_starts, q_sizes, k_starts, k_sizes))


def _made(
    blocks: list[tuple[int, int, int, int]], q_len: int, k_len: int, at_bottom: bool, left: int | None,
    right: int | None, block: Block,
) -> BlockMask:  # fmt: skip
    own: dict[tuple[int, int], BlockMask] = {}
    parts = []
    for q, q_size, k, k_size in blocks:
        if not (q_size and k_size):
            continue
        if (q_size, k_size) not in own:
            own[q_size, k_size] = window(q_size, k_size, left, right, block, offset=None if at_bottom else 0)
        parts.append((own[q_size, k_size], q, k))
    if not parts:
        return BlockMask.from_function(lambda q, k: q < 0, q_len, k_len, block=block)
    return place(parts, q_len, k_len)

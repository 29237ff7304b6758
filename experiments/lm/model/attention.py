"""Attention of one layer over its mask, by three implementations with equal results.

q and the result are [B, H, N, D], k and v [B, Hkv, N, D], where Hkv divides H.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import sparseflash
from experiments.lm.model.chosen import Choosing, ChosenBlocks
from sparseflash import BlockMask, interop, masks

IMPLEMENTATIONS = ("sparseflash", "sdpa", "flex")
LONGEST_DENSE_MASK = 32_768  # SDPA's mask has a byte for every score, its copies in the kernels two

Attention = Callable[[Tensor, Tensor, Tensor], Tensor] | ChosenBlocks | Choosing


def attention_over(mask: BlockMask | ChosenBlocks, implementation: str) -> Attention:
    """Attention under a fixed mask, or a layer that chooses blocks, which has its own weights.

    sparseflash: any mask. sdpa: `is_causal` for dense causal masks, otherwise an element mask. flex: compiled on a GPU,
    with the block lists of the mask.
    """
    if isinstance(mask, ChosenBlocks):
        if implementation != "sparseflash":
            raise ValueError(f"blocks that are chosen at every step need --attention sparseflash; got {implementation}")
        return mask
    if implementation == "sparseflash":
        return partial(_sparse, mask=mask)
    if implementation == "sdpa":
        return _scaled_dot_product(mask)
    if implementation == "flex":
        return _flex(mask)
    raise ValueError(f"attention must be one of {', '.join(IMPLEMENTATIONS)}; got {implementation!r}")


def is_dense_causal(mask: BlockMask) -> bool:
    same = masks.causal(mask.q_len, mask.k_len, block=(mask.block_q, mask.block_k))
    return mask.to("cpu") == same


def _sparse(q: Tensor, k: Tensor, v: Tensor, *, mask: BlockMask) -> Tensor:
    out: Tensor = sparseflash.attention(q, k, v, mask)
    return out


def _scaled_dot_product(mask: BlockMask) -> Attention:
    if is_dense_causal(mask):
        return partial(_pytorchs, is_causal=True)
    if mask.k_len > LONGEST_DENSE_MASK:
        raise ValueError(
            f"SDPA must be given a mask of elements for this pattern, which {mask.k_len} tokens make too large; choose "
            f"--context {LONGEST_DENSE_MASK} or less, --pattern dense, or --attention sparseflash or flex"
        )
    return partial(_pytorchs, attn_mask=mask.to_dense())


def _pytorchs(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] < q.shape[1], **how)


def _flex(mask: BlockMask) -> Attention:
    block_mask = interop.to_flex(mask, mask_mod=_is_causal if is_dense_causal(mask) else None)
    flex = _compiled_flex() if mask.device.type == "cuda" else _eager_flex()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flex(q, k, v, block_mask=block_mask, enable_gqa=k.shape[1] < q.shape[1])
        return out

    return attend


def _is_causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def _eager_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled_flex() -> Any:
    return torch.compile(_eager_flex(), dynamic=False)

"""The operator of the kernels that gather the queries of a block, `sparseflash::block_attention`: see `selected`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.direct import is_plain_call
from sparseflash.backends.registration import empty_gradient, empty_lse, empty_out, register
from sparseflash.backends.selected import Gradients, called
from sparseflash.limits import COUNT

_WIDEST, _WIDEST_VALUE = 192, 128  # head dims, of whose keys a tile fits into registers with its sums
_MOST_HEADS = 64  # that share a choice


def serves(q: Tensor, k: Tensor, v: Tensor, index: Tensor, span: int, backend: str | None) -> bool:
    """Whether `block_attention` takes these tensors, and may be chosen with this backend."""
    if backend not in (None, "triton") or (q.device.type != "cuda" and backend is None):
        return False
    if q.dtype not in (torch.float16, torch.bfloat16) or span < 16 or span & (span - 1):
        return False
    if q.shape[3] > _WIDEST or v.shape[3] > _WIDEST_VALUE or q.shape[1] > _MOST_HEADS * index.shape[1]:
        return False
    if index.numel() << max(0, index.shape[3] - 1).bit_length() >= COUNT:
        return False
    return torch.compiler.is_compiling() or is_plain_call(q, k, v, may_be_profiled=True)


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, *, span: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out, lse)`: attention to the blocks of `span` keys that `index [B, H, Nq, K]` lists.

    H is a multiple of the key heads and divides the query heads; query heads that follow one another share a list.
    Numbers of no block and repetitions are ignored. q, k and v are of one half precision dtype.
    """
    if scale < 0:  # the kernels take the maximum before scaling, which is right only for scale >= 0
        q, scale = -q, -scale
    out, lse, *_ = called(torch.ops.sparseflash.block_attention, q, k, v, index, span, causal, scale)
    return out, lse


def _attention(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, span: int, causal: bool, scale: float
) -> tuple[Tensor, ...]:  # fmt: skip
    from sparseflash.backends.triton.selected import block_api

    out, lse, lists = block_api.forward(q, k, v, index, span, causal, scale)
    return out, lse, *lists


def _fake_attention(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, span: int, causal: bool, scale: float
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, heads, q_len, choices = index.shape
    blocks = index.new_empty((batch * heads, q_len, choices), dtype=torch.int32)
    return empty_out(q, v), empty_lse(q), blocks, blocks.new_empty(blocks.shape[:2])


def _attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: Tensor,
    counts: Tensor, span: int, causal: bool, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    from sparseflash.backends.triton.selected import block_api
    from sparseflash.backends.triton.selected.block_lists import Chosen

    return block_api.backward(dout, dlse, q, k, v, out, lse, Chosen(blocks, counts), span, causal, scale)


def _fake_attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    return empty_gradient(q), empty_gradient(k), empty_gradient(v)


_gradients = Gradients("block_attention", 3)
register(
    "block_attention", "triton",
    (
        "(Tensor q, Tensor k, Tensor v, Tensor index, int span, bool causal, float scale) -> "
        "(Tensor, Tensor, Tensor, Tensor)", _attention, _fake_attention,
    ),
    (
        "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor blocks, "
        "Tensor counts, int span, bool causal, float scale) -> (Tensor, Tensor, Tensor)",
        _attention_backward, _fake_attention_backward,
    ),
    _gradients.differentiate, _gradients.save,
)  # fmt: skip

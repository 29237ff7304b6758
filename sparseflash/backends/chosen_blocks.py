"""The operator of the kernels that gather the queries of a block, `sparseflash::block_attention`: see `selected`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_gradient, empty_lse, empty_out, register
from sparseflash.backends.selected import Gradients, called


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
    sizes = (batch * heads * q_len * choices,), (batch * heads * (-(-k.shape[2] // span)),)
    lists = [index.new_empty(size, dtype=torch.int32) for size in (*sizes, (batch * heads, q_len, choices))]
    return empty_out(q, v), empty_lse(q), *lists


def _attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, entries: Tensor,
    ends: Tensor, chosen: Tensor, span: int, causal: bool, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    from sparseflash.backends.triton.selected import block_api
    from sparseflash.backends.triton.selected.block_lists import Transposed

    return block_api.backward(dout, dlse, q, k, v, out, lse, Transposed(entries, ends, chosen), span, causal, scale)


def _fake_attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    return empty_gradient(q), empty_gradient(k), empty_gradient(v)


_gradients = Gradients("block_attention", 3)
register(
    "block_attention", "triton",
    (
        "(Tensor q, Tensor k, Tensor v, Tensor index, int span, bool causal, float scale) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor)", _attention, _fake_attention,
    ),
    (
        "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor entries, "
        "Tensor ends, Tensor chosen, int span, bool causal, float scale) -> (Tensor, Tensor, Tensor)",
        _attention_backward, _fake_attention_backward,
    ),
    _gradients.differentiate, _gradients.save,
)  # fmt: skip

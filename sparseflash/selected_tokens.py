"""`token_attention`: attention in which every query has a list of tokens, shared by the heads of its group."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from sparseflash.attention import in_one_dtype
from sparseflash.backends import reference
from sparseflash.backends.refused_derivatives import (
    refuse_functional_gradients,
    refuse_second_gradients,
    refuse_tangents,
)
from sparseflash.backends.registration import LIBRARY, define, empty_gradient, empty_lse, empty_out
from sparseflash.blockmask.arguments import flag, integer
from sparseflash.remedies import refuse, without_others
from sparseflash.validation import check_tensors, checked_lists, checked_scale

TokenBackend = Literal["triton", "reference"]


@overload
def token_attention(
    q: Tensor, k: Tensor, v: Tensor | None, index: Tensor, *, v_dim: int | None = None, causal: bool = True,
    scale: float | None = None, return_lse: Literal[False] = False, backend: TokenBackend | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def token_attention(
    q: Tensor, k: Tensor, v: Tensor | None, index: Tensor, *, v_dim: int | None = None, causal: bool = True,
    scale: float | None = None, return_lse: Literal[True], backend: TokenBackend | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def token_attention(
    q: Tensor, k: Tensor, v: Tensor | None, index: Tensor, *, v_dim: int | None = None, causal: bool = True,
    scale: float | None = None, return_lse: bool = False, backend: TokenBackend | None = None, **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Exact attention in which every query has a list of tokens, shared by the heads of its group (DSA).

    >>> q, kv = torch.randn(1, 16, 100, 48), torch.randn(1, 1, 100, 48)  # 16 heads read one key head
    >>> index = torch.rand(1, 100, 100).topk(8).indices  # [Hkv, Nq, K]
    >>> token_attention(q, kv, None, index, v_dim=32).shape  # the first 32 columns of a key are its value
    torch.Size([1, 16, 100, 32])

    Query p of head h sees key t iff

        t is in index[b, h // group, p]   (and, if causal, t <= p + Nk - Nq)

    Args:
        q, k, v: `[B, Hq, Nq, D]`, `[B, Hkv, Nk, D]` and `[B, Hkv, Nk, Dv]`, as for `attention`; `group = Hq // Hkv`.
        v: None if the first `v_dim` columns of k are the values, as in multi-head latent attention (D = 576,
            Dv = 512). The gradient of k then has both parts.
        index: integers `[Hkv, Nq, K]` or `[B, Hkv, Nq, K]`, in any order. A number of no token, such as -1, is ignored,
            a token that is listed twice counts once. No gradient flows through it.
        causal: no query sees a key after it; such tokens of a list are ignored. The last query is at the last key.
        scale: `1 / sqrt(D)` by default.
        return_lse: also return lse `[B, Hq, Nq]`, the logarithm of the sum of exponentials.
        backend: `"triton"` by default for CUDA tensors, which takes fp16, bf16 and fp32, head dims up to 576, groups of
            up to 256 heads and lists of up to 8,192 tokens. `"reference"`, the default for others, takes every size
            and has memory for `Nq * Nk` scores.

    A query without a token has `out = 0`, `lse = -inf` and gradients of 0. Equal inputs have equal bits, forward and
    backward, in whatever order a list is. Time and memory follow the lists: a program gathers the tokens of one query,
    with the heads of a group as rows of its tile, and the backward takes up to 2 GiB more for the gradients of keys.
    Lists of blocks go to `grouped.selected_attention`, lists that neighbouring queries share to `attention` with
    `masks.selected_keys`.

    Raises ValueError or TypeError if the tensors do not fit together.

    Source: DeepSeek Sparse Attention (DeepSeek-V3.2, 2025), which chooses 2,048 tokens a query.
    """
    if others:
        refuse(others, "token_attention", _REMEDIES)
    if v is None:
        check_tensors(q, k, k)
        v_dim = _checked_v_dim(v_dim, k)
    else:
        check_tensors(q, k, v)
        if v_dim not in (None, v.shape[3]):
            raise ValueError(f"v_dim must be given without v only; got {v_dim} and a v with {v.shape[3]} columns.")
        v_dim = v.shape[3]
    q, k, other = in_one_dtype(q, k, k if v is None else v)
    v = None if v is None else other
    index = checked_lists(index, k.shape[0], k.shape[1], q.shape[2], q.device)
    scale, causal = checked_scale(scale, q.shape[3]), flag(causal, "causal")
    if backend is None:
        backend = "triton" if q.device.type == "cuda" else "reference"
    if backend == "reference":
        values = k[..., :v_dim] if v is None else v
        live = _live(index, k.shape[2], causal).repeat_interleave(q.shape[1] // k.shape[1], 1)
        out, lse = reference.attention_to_live(q, k, values, live, scale)
    elif backend == "triton":
        out, lse = _by_kernels(q, k, v, index, v_dim, causal, scale)
    else:
        raise ValueError(f"backend must be 'triton', 'reference' or None; got {backend!r}.")
    return (out, lse) if return_lse else out


_BY_MASK = "its kernels gather tokens, and know no tiles. Use attention with the mask masks.selected_keys(index, ...)"
_REMEDIES = {
    **dict.fromkeys(("scores", "dropout_p", "seed", "mask"), _BY_MASK),
    "cu_seqlens": "number the tokens of all packed sequences, and list for a query those of its own sequence",
    "lengths": "-1 in index is no token, so list none past the length, and none for a query past it",
    "span": "index lists tokens; blocks of tokens go to grouped.selected_attention(q, k, v, index, span=span)",
}
without_others(token_attention)


def _checked_v_dim(v_dim: int | None, k: Tensor) -> int:
    if v_dim is None:
        raise ValueError("v_dim must be given if v is None: the number of columns of k that are its values.")
    v_dim = integer(v_dim, "v_dim", "columns")
    if not 1 <= v_dim <= k.shape[3]:
        raise ValueError(f"v_dim must be from 1 to the {k.shape[3]} columns of k; got {v_dim}.")
    return v_dim


def _live(index: Tensor, k_len: int, causal: bool) -> Tensor:
    """The docstring's rule: bool `[B, Hkv, Nq, Nk]`."""
    index = index.to(torch.int64)
    none = (index < 0) | (index >= k_len)
    live = torch.zeros(*index.shape[:3], k_len + 1, dtype=torch.bool, device=index.device)
    live = live.scatter(3, index.masked_fill(none, k_len), True)[..., :k_len]
    if causal:
        q_len = index.shape[2]
        last = torch.arange(q_len, device=index.device)[:, None] + (k_len - q_len)
        live = live & (torch.arange(k_len, device=index.device) <= last)
    return live


def _by_kernels(
    q: Tensor, k: Tensor, v: Tensor | None, index: Tensor, v_dim: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of Triton's kernels, through their operator."""
    from sparseflash.backends.triton.selected import api  # imported late: the library must work without Triton
    from sparseflash.backends.triton.selected.tiles import shares_values

    api.check(q, k, v_dim, index.shape[3])
    refuse_functional_gradients("triton")
    refuse_tangents("triton", q, k, v)
    if v is None and not shares_values(k.shape[3], v_dim):
        v = k[..., :v_dim]
    if scale < 0:  # the kernels take the maximum before scaling, which is right only for scale >= 0
        q, scale = -q, -scale
    out, lse, *_ = torch.ops.sparseflash.token_attention(q, k, v, index, v_dim, causal, scale)
    return out, lse


def _forward(
    q: Tensor, k: Tensor, v: Tensor | None, index: Tensor, v_dim: int, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    from sparseflash.backends.triton.selected import api

    out, lse, chosen, kept = api.forward(q, k, v, index, v_dim, causal, scale)
    return out, lse, *chosen, kept


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor | None, index: Tensor, v_dim: int, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    lse = empty_lse(q)
    lists = index.new_empty(index.shape, dtype=torch.int32)
    kept = lse.new_empty((2, *lse.shape) if q.dtype == torch.float32 else (0,), dtype=torch.float32)
    return empty_out(q, k[..., :v_dim] if v is None else v), lse, lists, lists.new_empty(lists.shape[:3]), kept


def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor | None, out: Tensor, lse: Tensor,
    lists: Tensor, counts: Tensor, kept: Tensor, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    from sparseflash.backends.triton.selected import gradients
    from sparseflash.backends.triton.selected.lists import Chosen

    dq, dk, dv = gradients.backward(dout, dlse, q, k, v, out, lse, Chosen(lists, counts), kept, scale)
    return dq, dk, k.new_empty(0) if dv is None else dv


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:
    return empty_gradient(q), empty_gradient(k), k.new_empty(0) if v is None else empty_gradient(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *_, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 7
    q, k, v, out, *saved = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv = torch.ops.sparseflash.token_attention_backward(dout, dlse, q, k, v, out, *saved, ctx.scale)
    return dq, dk, None if v is None else dv, None, None, None, None


define(
    "token_attention",
    "(Tensor q, Tensor k, Tensor? v, Tensor index, int v_dim, bool causal, float scale) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
define(
    "token_attention_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor? v, Tensor out, Tensor lse, Tensor lists, Tensor counts, "
    "Tensor kept, float scale) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
torch.library.register_autograd("sparseflash::token_attention", _differentiate, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("sparseflash::token_attention_backward", refuse_second_gradients("triton"), lib=LIBRARY)

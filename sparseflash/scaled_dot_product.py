"""`sdpa`: block-sparse attention with the arguments of PyTorch's `scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from sparseflash.attention import Backend, attention
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, dense_tensor, described, flag, plain_tensor
from sparseflash.blockmask.cache import bounded_tensors
from sparseflash.interop.sdpa import from_sdpa
from sparseflash.masks.causal import causal
from sparseflash.remedies import refuse, without_others
from sparseflash.scores.bias import Bias, bias


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    block: Block = 128,
    backend: Backend | None = None,
    **others: Any,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, computed by `attention`, also with a `BlockMask`.

    >>> q, k, v = torch.randn(3, 2, 4, 100, 16)
    >>> live = torch.rand(100, 100) < 0.5
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=live)
    >>> torch.allclose(sdpa(q, k, v, attn_mask=live), theirs, atol=1e-5)
    True
    >>> from sparseflash import masks
    >>> sdpa(q, k, v, attn_mask=masks.local(100, window=32)).shape
    torch.Size([2, 4, 100, 16])

    Args:
        query, key, value: `[..., Hq, Nq, D]`, `[..., Hkv, Nk, D]` and `[..., Hkv, Nk, Dv]`, of 2 dimensions or more;
            all before the heads are batch dimensions. As in PyTorch, sizes of 1 of these and of the heads are expanded.
        attn_mask: which scores are live. A `BlockMask`; or a bool tensor, True where a score is live, whose dimensions,
            2 or more, broadcast to `[..., Hq, Nq, Nk]`; or a floating tensor that is added to the scores. Entries of
            -inf are dead; the others receive gradients. Large negative numbers such as `torch.finfo(dtype).min` save no
            work. Make them dead: `attn_mask.masked_fill(attn_mask <= torch.finfo(attn_mask.dtype).min, -torch.inf)`.
        dropout_p, scale: as for `attention`. With the same generator, other weights are dropped than in PyTorch.
        is_causal: query i sees keys 0..i. The diagonal starts at the upper left, as in PyTorch; `masks.causal` aligns
            it at the lower right by default, which differs unless Nq = Nk.
        enable_gqa: allows Hkv to be a divisor of Hq.
        block: tokens per side of a tile of the mask that a tensor, or `is_causal`, becomes.
        backend: as for `attention`.

    Returns:
        `[..., Hq, Nq, Dv]`. A query without a live key gives 0.

    Raises:
        TypeError, ValueError: the arguments do not fit together; `attn_mask` and `is_causal` are both given, as in
            PyTorch; a floating `attn_mask` has NaN or +inf.

    A tensor is converted at every call, in time that grows with its size, and on a GPU the host waits for it. So
    convert a mask that stays the same once, with `interop.from_sdpa(attn_mask)`. The mask of `is_causal` is cached. In
    code compiled by `torch.compile` a tensor breaks the graph; a `BlockMask` and `is_causal` do not.
    """
    if others:
        refuse(others, "sdpa", _REMEDIES)
    for name, x in (("query", query), ("key", key), ("value", value)):
        dense_tensor(x, name)
    query, key, value = _expanded(query, key, value)
    leading = 4 - query.ndim
    batch = query.shape[:-3]
    if leading < 0:
        q, k, v = (x.flatten(0, -leading) for x in (query, key, value))
        if isinstance(attn_mask, Tensor) and attn_mask.ndim > 3:
            own = (1,) * (query.ndim - attn_mask.ndim) + tuple(attn_mask.shape)
            if len(own) != query.ndim or any(1 != n != size for n, size in zip(own, batch)):
                raise ValueError(
                    f"attn_mask must broadcast to [*{list(batch)}, Hq, Nq, Nk]; got {list(attn_mask.shape)}."
                )
            attn_mask = attn_mask.expand(*batch, *own[-3:]).flatten(0, -leading)
    else:
        q, k, v = (x[(None,) * leading] for x in (query, key, value))
    if flag(is_causal, "is_causal") and attn_mask is not None:
        raise ValueError(
            "is_causal must not be given with an attn_mask; got both. Pass attn_mask & masks.causal(Nq, Nk, offset=0)."
        )
    if not flag(enable_gqa, "enable_gqa") and 1 != k.shape[1] != q.shape[1]:
        raise ValueError(
            f"query must have as many heads as key unless enable_gqa=True; got {q.shape[1]} and {k.shape[1]}."
        )
    mask, added = None, None
    if is_causal and q.shape[2] and k.shape[2]:
        mask = upper_left(q.shape[2], k.shape[2], block, q.device)
    elif isinstance(attn_mask, BlockMask):
        mask = attn_mask
    elif attn_mask is not None:
        mask, added = live_and_bias(attn_mask, q.shape[2], k.shape[2], block, device=q.device)
    out = attention(q, k, v, mask, scale=scale, dropout_p=dropout_p, scores=added, backend=backend)
    return out[(0,) * leading] if leading >= 0 else out.unflatten(0, batch)


def _expanded(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors with the same batch dimensions; with the same heads, too, unless k and v share one."""
    every = query, key, value
    shown = f"got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}."
    if any(x.ndim != query.ndim or x.ndim < 2 for x in every):
        raise ValueError(
            "query, key and value must have the same number of dimensions, [..., heads, tokens, head dim]; " + shown
        )
    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in every]
    is_shared = heads[1] == heads[2] and heads[0] >= heads[1]
    if is_shared and query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        return every
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in every))
    except RuntimeError:
        raise ValueError(
            "query, key and value must have the same dimensions before the heads, or 1: [..., heads, tokens, head "
            f"dim]; {shown}"
        ) from None
    query, key, value = (x.expand(*batch, *x.shape[-3:]) for x in every)
    if not is_shared:
        query, key, value = (
            x.expand(*batch, max(heads), -1, -1) if own == 1 else x for x, own in zip((query, key, value), heads)
        )
    return query, key, value


_OWN = "it has the arguments of PyTorch's own attention. Use attention, which has the others"
_REMEDIES = dict.fromkeys(("scores", "return_lse", "seed"), _OWN)
without_others(sdpa)


def upper_left(q_len: int, k_len: int, block: Block, device: torch.device) -> BlockMask:
    """The mask of PyTorch's `is_causal`."""
    if torch.compiler.is_compiling():
        return causal(q_len, k_len, offset=0, block=block).to(device)
    return _upper_left(q_len, k_len, block, device)


@bounded_tensors(maxsize=32)
def _upper_left(q_len: int, k_len: int, block: Block, device: torch.device) -> BlockMask:
    return causal(q_len, k_len, offset=0, block=block).to(device)


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="a mask that is a tensor is read on the host. Make a BlockMask of it once, outside, by interop.from_sdpa, "
    "or compile without fullgraph=True."
)
def live_and_bias(
    attn_mask: Tensor, q_len: int, k_len: int, block: Block = 128, name: str = "attn_mask",
    *, device: torch.device | None = None,
) -> tuple[BlockMask | None, Bias | None]:  # fmt: skip
    """`(live scores of an attn_mask of PyTorch, None: all; the bias that it adds, None: nothing)`.

    >>> live, added = live_and_bias(torch.tensor([[0.0, -torch.inf], [0.5, 0.0]]), 2, 2, block=16)
    >>> live.to_dense()[0, 0].tolist(), added.values[0, 0].tolist()
    ([[True, False], [True, True]], [[0.0, -inf], [0.5, 0.0]])

    device: where the mask of a `CausalBias`, which has no tensor, is needed; the CPU by default.
    """
    if isinstance(attn_mask, CausalBias):  # a mask that PyTorch describes in two numbers
        upper = attn_mask.variant is CausalVariant.UPPER_LEFT
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (q_len, k_len):
            raise ValueError(
                f"{name} must be of {q_len} queries and {k_len} keys; got {attn_mask.seq_len_q} and "
                f"{attn_mask.seq_len_kv}."
            )
        triangle = causal(q_len, k_len, offset=0 if upper else None, block=block)
        return triangle if device is None else triangle.to(device), None
    if not isinstance(attn_mask, Tensor) or not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
        got = attn_mask.dtype if isinstance(attn_mask, Tensor) else described(attn_mask)
        raise TypeError(f"{name} must be a BlockMask, a bool or a floating point tensor; got {got}.")
    if dense_tensor(attn_mask, name).device.type == "meta":
        raise ValueError(f"{name} must hold numbers; got a tensor on the meta device. Pass a BlockMask.")
    if not 2 <= attn_mask.ndim <= 4 or any(
        own not in (1, size) for own, size in zip(attn_mask.shape[-2:][::-1], (k_len, q_len))
    ):
        raise ValueError(
            f"{name} must have 2 to 4 dimensions and broadcast to [B, Hq, {q_len}, {k_len}]; got "
            f"{list(attn_mask.shape)}."
        )
    whole = attn_mask[(None,) * (4 - attn_mask.ndim)]
    if 0 in whole.shape or q_len == 0 or k_len == 0:
        return None, None
    plain_tensor(whole, name)
    if whole.dtype == torch.bool:
        return from_sdpa(whole, q_len=q_len, k_len=k_len, block=block), None
    dead = whole.detach() == -torch.inf
    if not bool((whole.detach().isfinite() | dead).all()):
        raise ValueError(f"{name} must hold finite numbers and -inf only; got NaN or +inf.")
    live = from_sdpa(~dead, q_len=q_len, k_len=k_len, block=block) if bool(dead.any()) else None
    # Entries of dead scores are not read, so -inf may stay there.
    nothing = not whole.requires_grad and bool((whole.masked_fill(dead, 0.0) == 0).all())
    return live, None if nothing else bias(whole)

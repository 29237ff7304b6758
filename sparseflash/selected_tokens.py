"""Attention in which every query has a list of tokens, shared by the heads of its group, and scores of such lists."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from sparseflash.attention import in_one_dtype
from sparseflash.backends import reference, selected
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
        backend: `"triton"` by default for CUDA tensors, which takes fp16, bf16 and fp32, head dims up to 576 (fp32:
            256), groups of up to 256 heads and lists of up to 8,192 tokens. `"reference"`, the default for others,
            takes every size and needs memory for `Nq * Nk` scores.

    A query without a token has `out = 0`, `lse = -inf` and gradients of 0. Equal inputs have equal bits, in whatever
    order a list is. Time and memory follow the lists: a program gathers the tokens of one query; the backward takes up
    to 2 GiB more for the gradients of keys. Lists of blocks go to `grouped.selected_attention`, lists that neighbouring
    queries share to `attention` with `masks.selected_keys`.

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
    if _chosen_backend(backend, q.device) == "reference":
        values = k[..., :v_dim] if v is None else v
        live = _live(_sorted(index, k.shape[2], causal), k.shape[2]).repeat_interleave(q.shape[1] // k.shape[1], 1)
        out, lse = reference.attention_to_live(q, k, values, live, scale)
    else:
        out, lse = _by_kernels(q, k, v, index, v_dim, causal, scale)
    return (out, lse) if return_lse else out


def token_scores(
    q: Tensor, k: Tensor, index: Tensor, *, causal: bool = True, scale: float | None = None,
    backend: TokenBackend | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(scores, tokens)`: the scores of listed tokens, with gradients, for an indexer's loss.

    >>> q, k = torch.randn(1, 4, 100, 32, requires_grad=True), torch.randn(1, 1, 100, 32)  # an indexer's
    >>> weights = torch.rand(1, 4, 100, 1)
    >>> index = torch.rand(1, 100, 100).topk(8).indices
    >>> scores, tokens = token_scores(q, k, index)
    >>> logits = (weights * scores.relu()).sum(1).masked_fill(tokens[:, 0] < 0, -torch.inf)  # DSA's lightning indexer
    >>> logits.shape, tokens.shape
    (torch.Size([1, 100, 8]), torch.Size([1, 1, 100, 8]))

        scores[b, h, p, n] = scale * q[b, h, p] . k[b, h // group, tokens[b, h // group, p, n]]

    Args:
        q, k: `[B, Hq, Nq, D]` and `[B, Hkv, Nk, D]`.
        index, causal, scale, backend: as for `token_attention`.

    Returns:
        scores fp32 (fp64 for fp64) `[B, Hq, Nq, K]`, and tokens int32 `[B, Hkv, Nq, K]`: the lists in ascending order,
        with -1, and a score of -inf, for entries that are no token or repeat one.

    A loss such as the KL divergence from the attention to the indexer's softmax takes the same lists for both.
    Gradients reach q and k, in a fixed order.

    Raises ValueError or TypeError if the tensors do not fit together.

    Source: the indexer's loss over chosen tokens in DeepSeek-V3.2 (2025), section 2.1.1.
    """
    check_tensors(q, k, k)
    q, k, _ = in_one_dtype(q, k, k)
    index = checked_lists(index, k.shape[0], k.shape[1], q.shape[2], q.device)
    scale, causal = checked_scale(scale, q.shape[3]), flag(causal, "causal")
    if _chosen_backend(backend, q.device) == "triton":
        selected.check(q, k, 1, index.shape[3])
        return selected.token_scores(q, k, index, causal, scale)
    tokens = _sorted(index, k.shape[2], causal)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    of_heads = tokens.repeat_interleave(q.shape[1] // k.shape[1], 1)
    if not scores.shape[3]:
        return scores.new_full(of_heads.shape, -torch.inf), tokens
    found = scores.gather(3, of_heads.clamp(min=0).long()).masked_fill(of_heads < 0, -torch.inf)
    return found, tokens


def _chosen_backend(backend: str | None, device: torch.device) -> str:
    if backend is None:
        return "triton" if device.type == "cuda" else "reference"
    if backend not in ("triton", "reference"):
        raise ValueError(f"backend must be 'triton', 'reference' or None; got {backend!r}.")
    return backend


def _sorted(index: Tensor, k_len: int, causal: bool) -> Tensor:
    """The lists in ascending order, int32, with -1 for entries that are no token or repeat one."""
    index = index.to(torch.int64)
    none = (index < 0) | (index >= k_len)
    if causal:
        q_len = index.shape[2]
        none |= index > torch.arange(q_len, device=index.device)[:, None] + (k_len - q_len)
    index = index.masked_fill(none, k_len).sort(-1).values
    again = torch.nn.functional.pad(index[..., 1:] == index[..., :-1], (1, 0)) if index.shape[3] else none
    return index.masked_fill(again | (index == k_len), -1).to(torch.int32)


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


def _live(tokens: Tensor, k_len: int) -> Tensor:
    """Whether each query's sorted list has each key: bool `[B, Hkv, Nq, Nk]`."""
    live = torch.zeros(*tokens.shape[:3], k_len + 1, dtype=torch.bool, device=tokens.device)
    return live.scatter(3, tokens.long() % (k_len + 1), True)[..., :k_len]  # -1 goes to a column past the last


def _by_kernels(
    q: Tensor, k: Tensor, v: Tensor | None, index: Tensor, v_dim: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    selected.check(q, k, v_dim, index.shape[3])
    if v is None and not selected.shares_values(k.shape[3], v_dim):
        v = k[..., :v_dim]
    if scale < 0:  # the kernels take the maximum before scaling, which is right only for scale >= 0
        q, scale = -q, -scale
    return selected.token_attention(q, k, v, index, v_dim, causal, scale)

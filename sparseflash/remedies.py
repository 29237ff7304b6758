"""Advice for keywords of other attentions: how to do the same here, or that it cannot be done."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

_CAUSAL = (
    "pass a mask, attention(q, k, v, masks.causal(q.shape[2], k.shape[2])). Where the lengths differ it is aligned at "
    "the bottom right, so the last query sees the last key; PyTorch's is_causal is aligned at the top left, as is "
    "masks.causal(..., offset=0)"
)
_WEIGHTS = (
    "attention weights are never all in memory. With return_lse=True, the weights of a few queries are "
    "exp(scale * q @ k.mT - lse[..., None]), where the mask is live"
)
REMEDIES = {
    "alibi_slopes": "pass scores=scores.alibi(alibi_slopes)",
    "attn_bias": "pass scores=scores.bias(attn_bias), and what it makes dead as a mask",
    "attn_mask": (
        "pass a mask, attention(q, k, v, interop.from_sdpa(attn_mask)), for an attn_mask of booleans, True where a "
        "score is live; what is added to live scores goes into scores=scores.bias(...). A sparseflash mask is passed "
        "as mask"
    ),
    "block_mask": "pass a mask, attention(q, k, v, interop.from_flex(block_mask))",
    "causal": _CAUSAL,
    "cu_seqlens": "packed sequences go into attention_varlen(q, k, v, cu_seqlens, pattern=...)",
    "dropout": "it is called dropout_p",
    "enable_gqa": "query heads are grouped whenever k and v have fewer heads",
    "is_causal": _CAUSAL,
    "key_padding_mask": (
        "pass a mask, attention(q, k, v, mask.with_lengths(lengths)), or interop.from_sdpa(~padding[:, None, None, :], "
        "q_len=q.shape[2]) if only keys are padded"
    ),
    "kernel_options": "tile sizes follow from the GPU and the mask; explain shows them",
    "need_weights": _WEIGHTS,
    "return_aux": "pass return_lse=True for the lse",
    "return_attn_probs": _WEIGHTS,
    "score_mod": (
        "pass scores=, such as scores.alibi(slopes), scores.bias(tensor) or scores.softcap(cap), or "
        "interop.from_score_mod(score_mod, q.shape[2])"
    ),
    "softcap": "pass scores=scores.softcap(softcap)",
    "softmax_scale": "it is called scale",
    "window_size": (
        "pass a mask, attention(q, k, v, masks.local(q.shape[2], k.shape[2], left=left, right=right)), with the length "
        "in place of -1"
    ),
}


def without_others(call: Callable[..., Any]) -> None:
    """Takes `**others`, which catches keywords of other attentions to refuse them, out of the signature of a call."""
    signature = inspect.signature(call)
    kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    call.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]


def refuse(
    keywords: Iterable[str], call: str = "attention", remedies: Mapping[str, str] = REMEDIES
) -> NoReturn:  # fmt: skip
    """Raises TypeError for keywords that `call` does not have.

    >>> refuse(["enable_gqa"])
    Traceback (most recent call last):
        ...
    TypeError: enable_gqa must not be given to attention: query heads are grouped whenever k and v have fewer heads.
    """
    name = next(iter(keywords))
    if name in remedies:
        raise TypeError(f"{name} must not be given to {call}: {remedies[name]}.")
    raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")

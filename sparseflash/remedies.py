"""What `attention` says of the keywords that other attentions have: how the same is done here, or that it is not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

_CAUSAL = (
    "give a mask, attention(q, k, v, masks.causal(q.shape[2], k.shape[2])). Where lengths differ it is aligned at the "
    "bottom right, the last query sees the last key; PyTorch's is_causal is aligned at the top left, which is "
    "masks.causal(..., offset=0)"
)
_BIAS = "there is none: scores are scaled and masked, and nothing else is done to them"
REMEDIES = {
    "alibi_slopes": _BIAS,
    "attn_bias": _BIAS,
    "attn_mask": (
        "give a mask, attention(q, k, v, interop.from_sdpa(attn_mask)), of booleans, True where a score is live; no "
        "numbers are added to scores"
    ),
    "block_mask": "give a mask, attention(q, k, v, interop.from_flex(block_mask))",
    "causal": _CAUSAL,
    "dropout": "it is called dropout_p",
    "enable_gqa": "heads of queries are grouped wherever k and v have fewer",
    "is_causal": _CAUSAL,
    "key_padding_mask": (
        "give a mask, attention(q, k, v, mask.with_lengths(lengths)), or interop.from_sdpa(~padding[:, None, None, :], "
        "q_len=q.shape[2]) where only keys are padded"
    ),
    "score_mod": _BIAS,
    "softcap": _BIAS,
    "softmax_scale": "it is called scale",
    "window_size": (
        "give a mask, attention(q, k, v, masks.local(q.shape[2], k.shape[2], left=left, right=right)), with the length "
        "for -1"
    ),
}


def refuse(keywords: Iterable[str]) -> NoReturn:
    """Raises TypeError for keywords that `attention` does not have.

    >>> refuse(["enable_gqa"])
    Traceback (most recent call last):
        ...
    TypeError: enable_gqa must not be given to attention: heads of queries are grouped wherever k and v have fewer.
    """
    name = next(iter(keywords))
    if name in REMEDIES:
        raise TypeError(f"{name} must not be given to attention: {REMEDIES[name]}.")
    raise TypeError(f"attention() got an unexpected keyword argument {name!r}")  # in Python's own words

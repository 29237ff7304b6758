"""FlashAttention's window over packed sequences: what its variable-length functions and the doors of engines share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparseflash.attention import Backend, attention
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, dense_tensor, flag
from sparseflash.blockmask.cache import bounded
from sparseflash.interop.alibi import alibi_of_sequences, score_changes
from sparseflash.masks.causal import causal as causal_mask
from sparseflash.masks.local import local
from sparseflash.pattern import Pattern
from sparseflash.varlen import mask_and_scores

Window = tuple[int | None, int | None]


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, *, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, learnable_sink: Tensor | None = None, block: Block = 128,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out [total_q, Hq, Dv], lse [Hq, total_q])`: see `flash_attn_varlen_func`.

    >>> q, k, v = torch.randn(3, 300, 4, 16)
    >>> packed_attention(q, k, v, [0, 100, 250], [0, 100, 250], causal=True)[0].shape
    torch.Size([300, 4, 16])
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if dense_tensor(x, name).ndim != 3:
            raise ValueError(f"{name} must have shape [tokens, heads, head dim]; got {list(x.shape)}.")
    left, right = sides(window_size, causal)
    pattern: Pattern | None = None if left is right is None else Within(left, right, block)
    if (left, right) == (None, 0):
        pattern = _causal(block)
    mask, q_stop, k_stop, _ = mask_and_scores(cu_seqlens_q, cu_seqlens_k, pattern, block, q.device)
    if q_stop > len(q) or k_stop > len(k):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must end with the numbers of tokens, {len(q)} and {len(k)}, or before "
            f"padding; got {q_stop} and {k_stop}."
        )
    padding = len(q) - q_stop
    if (q_stop, k_stop) != (len(q), len(k)):
        q, k, v = q[:q_stop], k[:k_stop], v[:k_stop]
    changes = score_changes(softcap, learnable_sink)
    if alibi_slopes is not None:
        changes = changes + alibi_of_sequences(alibi_slopes, q, k, cu_seqlens_q, cu_seqlens_k)
    qh, kh, vh = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = attention(
        qh, kh, vh, mask, scale=softmax_scale, return_lse=True,
        dropout_p=dropout_p, scores=changes if changes.changes else None, backend=backend,
    )  # fmt: skip
    out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)  # not an index, whose gradient is a copy into zeros
    if padding:
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padding))
        lse = torch.nn.functional.pad(lse, (0, padding), value=-torch.inf)
    return out, lse


@dataclass(frozen=True)
class Within:
    """The pattern of a window, which equals every other pattern of the same window, so that masks are kept by it."""

    left: int | None
    right: int | None
    block: Block

    def __call__(self, q_len: int, k_len: int | None = None) -> BlockMask:
        return window(q_len, q_len if k_len is None else k_len, self.left, self.right, self.block)


@bounded(maxsize=16)
def _causal(block: Block) -> Pattern:
    return partial(causal_mask, block=block)  # kept, because masks are kept by the object


def sides(window_size: Window, causal: bool) -> Window:
    """`(left, right)`, None for no limit. Raises TypeError unless the window is a pair of ints or None.

    >>> sides((32, -1), True)
    (32, 0)
    """
    given = window_size if isinstance(window_size, tuple | list) else ()
    if len(given) != 2 or not all(side is None or type(side) is int for side in given):
        raise TypeError(f"window_size must be (left, right), two ints, -1 for no limit; got {window_size!r}.")
    left, right = (None if side is None or side < 0 else side for side in given)
    return left, 0 if flag(causal, "causal") else right


def window(
    q_len: int, k_len: int, left: int | None, right: int | None, block: Block, offset: int | None = None
) -> BlockMask:
    """The mask of a window, by default aligned at the bottom right; None for no limit.

    >>> window(256, 256, None, 0, 64) == causal_mask(256, block=64)
    True
    """
    if (left, right) == (None, 0):
        return causal_mask(q_len, k_len, offset=offset, block=block)
    everything = q_len + k_len
    left, right = everything if left is None else left, everything if right is None else right
    return local(q_len, k_len, left=left, right=right, offset=offset, block=block)

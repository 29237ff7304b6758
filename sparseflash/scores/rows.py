"""Score modifications of a call whose query heads become rows of one head, as in `selected_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from sparseflash.scores.change import Change, Scores, Sizes
from sparseflash.scores.distance import Distance

_TAKEN = ("temperature", "softcap", "key_bias", "bias", "sink")


def in_rows(
    given: Scores, sizes: Sizes, kv_heads: int, rows: int, placed: Callable[[Tensor], Tensor]
) -> tuple[Scores | None, Tensor | None]:
    """The modifications for queries `[B, Hkv, Nq * rows, D]`, and the logits `[Hq]` of a sink, which joins later.

    >>> from sparseflash import scores
    >>> values = scores.temperature(torch.tensor([1.0, 2.0, 3.0, 4.0])) + scores.sink(torch.zeros(4))
    >>> changes, logits = in_rows(values, Sizes(1, 4, 3, 5, torch.device("cpu")), 2, 16, lambda x: x)
    >>> changes.kinds, changes.tensors()[0].shape, logits.shape
    (('temperature',), torch.Size([1, 2, 48]), torch.Size([4]))

    sizes: of the call, with Hq heads. placed: puts a tensor's last dimension, of keys, where the call has put the keys.

    Raises ValueError for other kinds, whose numbers depend on the head or the position of a query.
    """
    found: list[Change] = []
    logits = None
    group = sizes.heads // kv_heads
    for change in given.changes:  # before any is checked against sizes that it will not have
        if change.kind not in _TAKEN:
            _refuse(("log_decay" if change.is_log else "alibi") if isinstance(change, Distance) else change.kind)
    for change in given.prepared(sizes).changes:
        if change.kind == "sink":
            (logits,) = change.tensors()
        elif change.kind == "softcap":
            found.append(change)
        elif change.kind == "temperature":
            (x,) = change.tensors()
            found.append(change.with_tensors([_rows(x.expand(-1, sizes.heads, sizes.q_len), kv_heads, rows, 1.0)]))
        elif change.kind == "key_bias":
            (x,) = change.tensors()
            if x.shape[1] > 1 and group > 1:
                _refuse("a key_bias for each query head, which must be shared by the heads")
            found.append(change.with_tensors([x if x.shape[-1] == 1 else placed(x)]))
        else:
            (x,) = change.tensors()
            x = x if x.shape[-1] == 1 else placed(x)
            x = x.expand(-1, sizes.heads, -1, -1).unflatten(1, (kv_heads, group)).transpose(2, 3)
            x = torch.nn.functional.pad(x, (0, 0, 0, rows - group))
            found.append(change.with_tensors([x.flatten(2, 3)]))
    return Scores(tuple(found)) if found else None, logits


def _rows(x: Tensor, kv_heads: int, rows: int, value: float) -> Tensor:
    """`[B, Hq, Nq]` as `[B, Hkv, Nq * rows]`."""
    x = x.unflatten(1, (kv_heads, -1)).transpose(2, 3)
    return torch.nn.functional.pad(x, (0, rows - x.shape[-1]), value=value).flatten(2, 3)


def _refuse(what: str) -> NoReturn:
    raise ValueError(
        f"scores of selected_attention must be of temperature, softcap, key_bias, bias and sink; got {what}. Use "
        "attention with the mask of the same blocks, masks.selected_keys(index, k_len=Nk, span=span, group=group)."
    )

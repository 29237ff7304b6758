"""The rules by which Hugging Face Transformers describes a model's masks: which are equal, and which can be decoded."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

_RULES = "transformers.masking_utils"


def fingerprint(rule: Any) -> Hashable | None:
    """A key of a rule that Transformers built from numbers and other rules; equal rules have equal keys.

    None for a rule that refers to tensors, and for a user's own.
    """
    if isinstance(rule, int | float | str | bool | None):
        return (type(rule), rule)
    if isinstance(rule, tuple):
        parts = tuple(map(fingerprint, rule))
        return None if None in parts else parts
    if not isinstance(rule, FunctionType) or rule.__module__ != _RULES or rule.__defaults__ or rule.__kwdefaults__:
        return None
    cells = fingerprint(tuple(cell.cell_contents for cell in rule.__closure__ or ()))
    return None if cells is None else (rule.__code__, cells)


def causal_window(rule: Any) -> tuple[bool, int | None]:
    """`(whether the rule is that of a causal mask, the keys of its window or None)`."""
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

    if rule is causal_mask_function:
        return True, None
    known = fingerprint(rule)
    if known is not None:
        for number in _integers_in(known):
            if number > 0 and fingerprint(sliding_window_causal_mask_function(number)) == known:
                return True, number
    return False, None


def _integers_in(known: Any) -> Iterator[int]:
    """The integers in a fingerprint."""
    if isinstance(known, tuple):
        if len(known) == 2 and known[0] is int:
            yield known[1]
        else:
            for part in known:
                yield from _integers_in(part)


def first_tokens(padding: Tensor, start: int, stop: int) -> Tensor | None:
    """How many keys from `start` on are padding before the first token of each row, int32 `[B]`; None if padding up to
    `stop` is not all on the left.

    >>> first_tokens(torch.tensor([[False, True, True], [True, True, True]]), 0, 3).tolist()
    [1, 0]

    `padding`: bool `[B, >= stop]`, True for tokens. Synchronises with the device.
    """
    live = padding[:, start:stop]
    count = live.sum(1)
    first = live.shape[1] - count
    if not bool((live == (torch.arange(live.shape[1], device=live.device) >= first[:, None])).all()):
        return None
    return first.to(torch.int32)

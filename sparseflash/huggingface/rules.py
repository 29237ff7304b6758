"""Transformers' rules for a model's masks: equality, decoding, and the live scores."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask

if TYPE_CHECKING:
    from sparseflash.huggingface.model_mask import ModelMask

Rule = Callable[[Any, Any, Any, Any], Any]

_RULES = "transformers.masking_utils"


def fingerprint(rule: Any) -> Hashable | None:
    """A key of a rule that Transformers built from numbers and other rules; equal rules have equal keys.

    None for a rule that refers to tensors, and for a rule of the user.
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


def unpacked(rule: Rule) -> Rule:
    """The rule without the condition that two tokens are of one packed sequence, if every row is one sequence.

    Transformers leaves the condition out itself, but not while a model is traced (`torch.compile`); with it the mask
    would be built anew in every forward. Synchronises with the device if the rule has the tensor.
    """
    from transformers import masking_utils

    causal = masking_utils.causal_mask_function
    both = _closure(rule, masking_utils.and_masks(causal))
    if both is None:
        return rule
    own, *others = both["mask_functions"]
    packed = _closure(others[-1], masking_utils.packed_sequence_mask_function(None)) if len(others) == 1 else None
    numbers = None if packed is None else packed["packed_sequence_mask"]  # [B, N], which sequence a token belongs to
    if numbers is None or numbers.device.type == "meta" or bool(numbers.any()):
        return rule
    # Newer versions let a rule see the positions in packed sequences, again only if a row has several.
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    moved = None if remap is None else _closure(own, remap(causal, None))
    kept: Rule = own if moved is None else moved["mask_function"]
    return kept


def _closure(rule: Any, like: FunctionType) -> dict[str, Any] | None:
    """The variables that a rule refers to, by name, if it was made as `like` was; otherwise None."""
    if not isinstance(rule, FunctionType) or rule.__code__ is not like.__code__:
        return None
    return {name: cell.cell_contents for name, cell in zip(rule.__code__.co_freevars, rule.__closure__ or ())}


def causal_window(rule: Any) -> tuple[bool, int | None]:
    """`(whether the rule is causal, the keys of its window or None)`."""
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
    if isinstance(known, tuple):
        if len(known) == 2 and known[0] is int:
            yield known[1]
        else:
            for part in known:
                yield from _integers_in(part)


def first_tokens(live: Tensor) -> Tensor | None:
    """The number of padding keys before the first token of each row, int32 `[B]`; None unless all padding is on the
    left.

    >>> first_tokens(torch.tensor([[False, True, True], [True, True, True]])).tolist()
    [1, 0]

    `live`: bool `[B, n]`, True for tokens. Synchronises with the device.
    """
    count = live.sum(1)
    first = live.shape[1] - count
    if not bool((live == (torch.arange(live.shape[1], device=live.device) >= first[:, None])).all()):
        return None
    return first.to(torch.int32)


def rule_mask(asked: ModelMask, pattern: BlockMask | None) -> BlockMask:
    """The mask of a model's rule, with a batch of B or 1 and one head, evaluated only in tiles of the pattern."""
    q_len, k_len = asked.queries[1] - asked.queries[0], asked.keys[1] - asked.keys[0]
    block = asked.block if pattern is None else (pattern.block_q, pattern.block_k)
    candidates = None if pattern is None else pattern.to_layout().any(1).any(0)

    def live(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.as_tensor(asked.rule(b, h, q + asked.queries[0], k + asked.keys[0]), device=q.device)

    # A rule of numbers alone is the same for every row, so its mask can be reused for any batch size.
    batch = 1 if fingerprint(asked.rule) is not None else asked.batch
    return BlockMask.from_function(
        live, q_len, k_len, batch=batch, block=block, candidates=candidates, device=asked.device
    )

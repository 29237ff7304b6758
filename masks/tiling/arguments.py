"""Checks of the arguments of patterns: numbers with a lower bound, positions, square blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from sparseflash.blockmask.arguments import block_pair, integer, integers, token_counts

# No mask has 2^31 tokens, so larger numbers of tokens or blocks all mean the same as this one. Sums of several of them
# and of positions stay far below 2^63, so tensors of int64 can hold them.
FAR = 1 << 40
MOST_HEADS = 1 << 16


def at_least(least: int, value: Any, name: str, unit: str) -> int:
    """`value` as an int from `least` to `FAR`; larger values become `FAR`. `unit` in the plural, or ""."""
    number = integer(value, name, unit)
    if number < least:
        bound = f"{least} {unit.removesuffix('s') if least == 1 else unit}".strip()
        raise ValueError(f"{name} must be at least {bound}; got {number}.")
    return min(number, FAR)


def head_count(value: Any, name: str = "heads", unit: str = "heads") -> int:
    """A number of heads, at most `MOST_HEADS`, because many builders loop over them."""
    number = at_least(1, value, name, unit)
    if number > MOST_HEADS:
        raise ValueError(f"{name} must be at most {MOST_HEADS} {unit}; got {value}.")
    return number


def with_cache(q_len: int, k_len: int | None, offset: int | None) -> tuple[int, int, int]:
    """`(q_len, k_len, offset)`: by default there are as many keys as queries, and the last query is at the last key."""
    q_len, k_len = token_counts(q_len, q_len if k_len is None else k_len)
    offset = k_len - q_len if offset is None else integer(offset, "offset", "tokens")
    if not -(2**31) <= offset <= 2**31:
        raise ValueError(f"offset must lie between -2^31 and 2^31 tokens; got {offset}.")
    return q_len, k_len, offset


def is_list(value: Any) -> bool:
    """Whether `value` is a list, tensor or array, not a single number."""
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0


def positions(values: Any, name: str, stop: int) -> Tensor:
    """Integers from 0 to `stop - 1`, in any order and possibly repeated, as a sorted int64 tensor `[E]` on the CPU."""
    distinct: Tensor = torch.unique(integers(values, name))
    if len(distinct) and not (int(distinct[0]) >= 0 and int(distinct[-1]) < stop):
        raise ValueError(f"{name} must lie in 0..{stop - 1}; got {int(distinct[0])}..{int(distinct[-1])}.")
    return distinct


def square_blocks(q_len: Any, block: Any, pattern: str) -> tuple[int, int, int]:
    """`(q_len, block, nb)` of a pattern that is defined on blocks, which must be square; nb is their number."""
    if not isinstance(block, int | SupportsIndex):
        raise TypeError(f"block must be an int ({pattern} blocks are square); got {block!r}.")
    block, _ = block_pair(block)  # type: ignore[arg-type]
    q_len, _ = token_counts(q_len, q_len)
    return q_len, block, -(-q_len // block)


def choice(value: Any, name: str, choices: Sequence[str]) -> str:
    """`value` if it is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")
    return str(value)

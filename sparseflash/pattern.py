"""Patterns as functions: of the lengths, which return a mask, or of the positions of a query and a key."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, checked_mask
from sparseflash.blockmask.compiled_rules import call_rules, constant
from sparseflash.blockmask.compiling import constant_when_compiled

Pattern = Callable[..., Any]


def check_pattern(pattern: object) -> None:
    """Raises TypeError unless this is a function or None."""
    if pattern is not None and not callable(pattern):
        raise TypeError(
            "pattern must be a function of a sequence's length that returns its mask, such as masks.causal, or a rule "
            f"of positions (q, k); got {type(pattern).__name__}. The beginnings of a mask are "
            "lambda n: mask.crop(q=(0, n), k=(0, n)); keep that function for all calls."
        )


def _call(pattern: Pattern | None, q_len: int, k_len: int, **_: Any) -> None:
    if callable(pattern):
        if is_rule(pattern):
            call_rules(2, pattern)
        else:
            pattern(q_len) if q_len == k_len else pattern(q_len, k_len)


@partial(constant_when_compiled, calls=_call)
def mask_of_lengths(pattern: Pattern | None, q_len: int, k_len: int, *, block: Block = 128) -> BlockMask:
    """The mask of a pattern for these lengths, on the CPU.

    >>> from sparseflash import masks
    >>> mask_of_lengths(masks.causal, 100, 100) == mask_of_lengths(lambda q, k: k <= q, 100, 100) == masks.causal(100)
    True

    Args:
        pattern: a function of one argument takes the length, or both lengths if they differ, and returns the mask. A
            function of two arguments is a rule for the positions of queries and keys, where the last query and the last
            key are at the same position. None: all scores are live.
        block: tokens per side of a tile, for the mask of a rule and of None; other patterns choose their own.
    """
    return made_for(pattern, is_rule(pattern), q_len, k_len, block)


def made_for(pattern: Pattern | None, rule: bool, q_len: int, k_len: int, block: Block) -> BlockMask:
    """`mask_of_lengths` outside of compiled code, for many lengths. rule: whether `is_rule(pattern)`."""
    if pattern is None:
        return BlockMask.dense(q_len, k_len, block=block)
    if rule:
        first_q, first_k = max(0, k_len - q_len), max(0, q_len - k_len)
        placed = pattern if q_len == k_len else lambda q, k: pattern(q + first_q, k + first_k)
        try:
            return BlockMask.from_function(placed, q_len, k_len, block=block)
        except Exception as error:  # whatever a function of lengths raises for positions
            _refuse_function_of_lengths(pattern, q_len, k_len, error)
            raise
    return of_lengths(pattern(q_len) if q_len == k_len else pattern(q_len, k_len), q_len, k_len)


def _refuse_function_of_lengths(pattern: Pattern, q_len: int, k_len: int, error: Exception) -> None:
    try:
        returned = pattern(q_len, k_len)
    except Exception:  # a rule, whose own error says what is wrong
        return
    if isinstance(returned, BlockMask):
        raise TypeError(
            "pattern must take one argument, or any number, to be given lengths: a function of two is a rule of "
            "positions; got one that returns a mask. Write lambda *lengths: masks.local(*lengths, window=512), which "
            "is given both lengths if they differ."
        ) from error


def of_lengths(returned: Any, q_len: int, k_len: int) -> BlockMask:
    """The mask that a pattern returned for these lengths, checked and moved to the CPU."""
    mask = checked_mask(returned).to("cpu")
    if (mask.q_len, mask.k_len) != (q_len, k_len):
        raise ValueError(
            f"pattern must return a mask of the sequence's length, {q_len} queries and {k_len} keys; it returned one "
            f"of {mask.q_len} and {mask.k_len}."
        )
    return mask


def is_rule(pattern: Pattern | None) -> bool:
    """Whether a function takes two positions, and not one length; False for None."""
    if pattern is None:
        return False
    try:
        parameters = inspect.signature(pattern).parameters.values()
    except ValueError:  # also of a `partial` with an unknown keyword, which its function will name
        return not isinstance(pattern, partial) or is_rule(pattern.func)
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(needed) > 2:
        raise TypeError(
            "a pattern must be a function of a sequence's length, or a rule of positions (q, k); got one of "
            f"({', '.join(each.name for each in needed)}). One of heads, too, is a function of the length: "
            "lambda n: BlockMask.from_function(rule, n, heads=heads)."
        )
    return len(needed) == 2


constant(is_rule)

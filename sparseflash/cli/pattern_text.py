"""A pattern as text, for programs that know the number of tokens: a name, an expression, or a function of the user.

local(n, window=64)              an expression of sparseflash.masks, where n is the number of tokens
butterfly                        a pattern that needs only the number of tokens
folder/mine.py:windows           a function of the number of tokens that returns a mask
mine.py:rule, package.mine:rule  a rule rule(q, k) on positions; with four arguments (b, h, q, k) it has a mask by head
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sparseflash import BlockMask
from sparseflash.cli.expression import called, mask_of, needed
from sparseflash.cli.patterns import patterns
from sparseflash.cli.sources import Missing, module_of

Named = Mapping[str, Callable[[], BlockMask]]


def mask_of_pattern(text: str, length: int, *, block: int, named: Named | None = None, heads: int = 1) -> BlockMask:
    """The mask of a pattern for `length` queries and keys, on the CPU.

    >>> mask_of_pattern("local(n, window=64) | butterfly(n)", 512, block=64)
    BlockMask(512 x 512, blocks of 64, 38 tiles: 32 full + 6 partial (2 distinct), density 51.2 %)

    Args:
        text: one pattern; see above. Patterns of the library have blocks of `block` tokens, unless it says others.
        named: patterns that the program has names for, which come first.
        heads: query heads, for rules by head. Raises ValueError if the text gives no mask of this length.

    Errors inside the user's code propagate unchanged.
    """
    text = text.strip()
    if named and text in named:
        return named[text]()
    if text.isidentifier() and text in (library := patterns()):
        return _fitting(_called(text, library[text], length, block), text, length)
    place, colon, name = text.rpartition(":")
    if colon and name.isidentifier() and "(" not in text:
        return _fitting(_own(text, place, name, length, block, heads), text, length)
    if text.isidentifier() or "(" not in text:
        known = ", ".join(named or ())
        raise ValueError(
            f"the pattern must be {known}{', ' if known else ''}an expression such as local(n, window=64), or a "
            f"function as file.py:function; got {text!r}"
        )
    own = {each: partial(function, block=block) for each, function in patterns().items() if _takes(function, "block")}
    hint = "The number of tokens is n. For a function of yours: file.py:function."
    return _fitting(mask_of(text, names={"n": length, "block": block, **own}, hint=hint), text, length)


def _called(name: str, function: Callable[..., BlockMask], length: int, block: int) -> BlockMask:
    try:
        inspect.signature(function).bind(length, block=block)
        return function(length, block=block)
    except TypeError:
        raise ValueError(f"{name} must be called, with n for the number of tokens: {called(name, function)}") from None


def _own(text: str, place: str, name: str, length: int, block: int, heads: int) -> Any:
    function = function_of(place, name)
    arguments = needed(function)
    if len(arguments) == 2:
        return BlockMask.from_function(function, length, block=block)
    if len(arguments) == 4:
        return BlockMask.from_function(function, length, heads=heads, block=block)
    if len(arguments) != 1:
        raise ValueError(
            f"{text} must take the number of tokens, and the block size by name, as function(q_len, *, block) does, or "
            f"be a rule of (q, k) or (b, h, q, k); got a function of {inspect.signature(function)}"
        )
    return function(length, block=block) if _takes(function, "block") else function(length)


def function_of(place: str, name: str) -> Callable[..., Any]:
    """The function of this name in a Python file or a module."""
    try:
        module = module_of(place)
    except Missing as error:
        raise ValueError(str(error)) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{place} must define a function {name}; it has none")
    found: Callable[..., Any] = function
    return found


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _fitting(mask: Any, text: str, length: int) -> BlockMask:
    if not isinstance(mask, BlockMask):
        raise ValueError(f"{text} must return a BlockMask; got {type(mask).__name__}")
    if (mask.q_len, mask.k_len) != (length, length):
        raise ValueError(f"{text} must return a mask of {length} queries and keys; got {mask.q_len} and {mask.k_len}")
    if mask.shape[0] != 1:
        raise ValueError(f"{text} must return a mask for one batch element; got {mask.shape[0]}")
    return mask


def parts(text: str, separator: str) -> list[str]:
    """The parts between separators outside of brackets.

    >>> parts("local(n, window=64), dense", ",")
    ['local(n, window=64)', 'dense']
    """
    found, depth, start = list[str](), 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == separator and depth == 0:
            found.append(text[start:at].strip())
            start = at + 1
    return [*found, text[start:].strip()]


def groups(text: str, named: Collection[str]) -> list[str]:
    """The parts between slashes, except the slashes of paths.

    >>> groups("dense/folder/mine.py:rule|local/other/mine.py:rule", ["dense", "local"])
    ['dense', 'folder/mine.py:rule|local', 'other/mine.py:rule']
    """
    found = list[str]()
    for union in parts(text, "|"):
        first, *others = _between_paths(union, named)
        found[-1:] = [f"{found[-1]}|{first}" if found else first]
        found += others
    return found


def _between_paths(text: str, named: Collection[str]) -> list[str]:
    found, waiting = list[str](), list[str]()
    for part in parts(text, "/"):
        waiting.append(part)
        if ".py:" not in part:
            continue
        starts = range(len(waiting))
        file = next((at for at in starts if Path("/".join(waiting[at:]).rpartition(":")[0]).is_file()), None)
        if file is None:
            file = max((at + 1 for at in starts[:-1] if waiting[at] in named or "(" in waiting[at]), default=0)
        found += [*waiting[:file], "/".join(waiting[file:])]
        waiting = []
    return [*found, *waiting]

"""Masks by their names on the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from sparseflash import BlockMask, masks
from sparseflash.cli.sources import Missing, module_of

NAMES = ("dense", "local", "butterfly")


def build(name: str, length: int, *, block: int, window: int) -> BlockMask:
    """The mask of `length` queries and keys, on the CPU.

    name: "dense", "local" (|q - k| <= window // 2), "butterfly", or a user's function, as "module:function" or
        "path/to/file.py:function"; called with (length, block=block), it returns the BlockMask.
    Raises ValueError for other names, and for a function that returns anything else.
    """
    if name == "dense":
        return BlockMask.dense(length, block=block)
    if name == "local":
        return masks.local(length, window=window, block=block)
    if name == "butterfly":
        return masks.butterfly(length, block=block)
    if ":" not in name:
        raise ValueError(f"the mask must be {', '.join(NAMES)}, module:function or file.py:function; got {name!r}")
    function = load_function(name)
    check_signature(function, name, length, block)
    mask = function(length, block=block)
    if not isinstance(mask, BlockMask):
        raise ValueError(f"{name} must return a BlockMask; got {type(mask).__name__}")
    if (mask.q_len, mask.k_len) != (length, length):
        raise ValueError(f"{name} must return a mask of {length} queries and keys; got {mask.q_len} and {mask.k_len}")
    return mask


def load_function(name: str) -> Callable[..., object]:
    """The function named by "module:function" or "path/to/file.py:function"."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError(f"the mask must be given as module:function or file.py:function; got {name!r}")
    try:
        module = module_of(place)
    except Missing:
        if place.endswith(".py"):
            raise ValueError(f"the mask's file {place} does not exist") from None
        raise ValueError(f"the mask's module {place!r} was not found; got {name!r}") from None
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"{place} must define a function {attribute}(q_len, *, block); it has none")
    found: Callable[..., object] = function
    return found


def check_signature(function: Callable[..., object], name: str, length: int, block: int) -> None:
    """Raises ValueError if the function's signature does not fit, as distinct from a function that fails."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind(length, block=block)
    except TypeError as error:
        raise ValueError(
            f"{name} must take the number of tokens, and the block size by name, as function(q_len, *, block) does; "
            f"got a function of {signature}: {error}"
        ) from None

"""The calls of the library's functions: lengths by position, everything else by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.cache import SMALL_MASK, BoundedDict
from sparseflash.blockmask.compiling import constant_when_compiled, is_faking
from sparseflash.blockmask.recorded import answer, is_recorded
from sparseflash.blockmask.threads import on_one_thread

P = ParamSpec("P")
T = TypeVar("T")

_kept = BoundedDict(64)  # small masks, by the function that makes them and its arguments
_NUMBERS = frozenset((int, bool, float, str, type(None)))  # their equality and type tell all that a function sees


def pattern(build: Callable[P, BlockMask]) -> Callable[P, BlockMask]:
    """Decorates a family with a known rule: `by_name`, made `on_one_thread`, small masks `kept`, and its masks are
    constants in functions that torch.compile compiles.
    """
    return by_name(kept(constant_when_compiled(on_one_thread(build))))


def kept(build: Callable[P, BlockMask]) -> Callable[P, BlockMask]:
    """Decorates a function of numbers that makes masks: the same arguments give the same mask, if it is small and among
    the last few. So a mask that is made anew at every step costs the host a look-up.
    """

    @functools.wraps(build)
    def called(*args: P.args, **kwargs: P.kwargs) -> BlockMask:
        if torch.compiler.is_compiling() or is_faking():
            return build(*args, **kwargs)
        numbers = _key_of_numbers(*args, *kwargs.values())
        if numbers is None:
            return build(*args, **kwargs)
        if is_recorded(called, args, kwargs):
            return answer(called, numbers[0][0], kwargs, (called, numbers[0][1:], numbers[1][1:], tuple(kwargs)))
        key = build, numbers, tuple(kwargs)
        mask: BlockMask | None = _kept.get(key)
        if mask is None:
            with torch.inference_mode(False):  # otherwise a later training step could not use it
                mask = build(*args, **kwargs)
            # A mode of the caller's may have made tensors of a class of its own.
            if mask.nbytes <= SMALL_MASK and all([type(x) is Tensor for x in mask._arrays() if x is not None]):
                _kept[key] = mask
        return mask

    return called


def _key_of_numbers(*values: Any) -> tuple[Any, ...] | None:
    """A key for arguments that are numbers, names or tuples of integers, which tells 1, 1.0 and True apart; None for
    others.
    """
    kinds = tuple(map(type, values))
    for kind, x in zip(kinds, values, strict=True):
        if kind not in _NUMBERS and not (kind is tuple and all([type(y) is int for y in x])):
            return None
    return values, kinds


def by_name(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function with keyword-only parameters: the errors for too many positional arguments, and for names
    that it does not have, list those parameters.

    >>> @by_name
    ... def window_of(q_len, k_len=None, *, window): ...
    >>> window_of(1, 4096, 256)
    Traceback (most recent call last):
        ...
    TypeError: window_of must be given q_len and k_len by position and the rest by name (window=); got 3 by position.
    >>> window_of(4096, window_size=256)
    Traceback (most recent call last):
        ...
    TypeError: window_of must be given q_len and k_len by position and the rest by name (window=); got window_size=.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    most, known = len(positional), frozenset(p.name for p in parameters)
    expected = f"{' and '.join(positional)} by position"
    if named := ", ".join(f"{p.name}=" for p in parameters if p.kind is p.KEYWORD_ONLY):
        expected += f" and the rest by name ({named})"

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if len(args) > most:
            raise TypeError(f"{called.__name__} must be given {expected}; got {len(args)} by position.")
        if not known >= kwargs.keys():
            unknown = next(name for name in kwargs if name not in known)
            raise TypeError(f"{called.__name__} must be given {expected}; got {unknown}=.")
        return function(*args, **kwargs)

    called.__signature__ = signature  # type: ignore[attr-defined]  # or `is_rule` would look for it at every call
    return called

"""The calls of the library's functions: lengths by position, everything else by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.compiling import constant_when_compiled
from sparseflash.blockmask.threads import on_one_thread

P = ParamSpec("P")
T = TypeVar("T")


def pattern(build: Callable[P, BlockMask]) -> Callable[P, BlockMask]:
    """Decorates a family with a known rule: `by_name`, made `on_one_thread`, and its masks are constants in functions
    that torch.compile compiles.
    """
    return by_name(constant_when_compiled(on_one_thread(build)))


def by_name(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function with keyword-only parameters: the error for too many positional arguments names those
    parameters.

    >>> @by_name
    ... def window_of(q_len, k_len=None, *, window): ...
    >>> window_of(1, 4096, 256)
    Traceback (most recent call last):
        ...
    TypeError: window_of must be given q_len and k_len by position and the rest by name (window=); got 3 by position.
    """
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    most, expected = len(positional), f"{' and '.join(positional)} by position"
    if named := ", ".join(f"{p.name}=" for p in parameters if p.kind is p.KEYWORD_ONLY):
        expected += f" and the rest by name ({named})"

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if len(args) > most:
            raise TypeError(f"{called.__name__} must be given {expected}; got {len(args)} by position.")
        return function(*args, **kwargs)

    return called

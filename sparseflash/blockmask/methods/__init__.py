"""The methods of `BlockMask`, by concern: functions of a mask that the class binds under their names.

- `construction`: from a rule, a matrix, a layout, tiles, lists of blocks.
- `algebra`: & | ^ - ~.
- `moves`: other tiles, other orders, parts of a mask.
- `padding`: lengths of sequences.
- `conversion`: devices, dense matrices, layouts, files, the canonical form, checks.
- `drawing`: characters, matplotlib, HTML.

Each function has its method's documentation and calls the module of `blockmask`, `blockmask.ops` or `draw` that
implements it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from sparseflash.blockmask.compiling import constant_when_compiled
from sparseflash.blockmask.threads import on_one_thread

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")


def method(function: F) -> F:
    """Decorates a function that `BlockMask` has as a method, so that errors, `help` and pickle know it as that."""
    function.__module__, function.__qualname__ = "sparseflash.blockmask.mask", f"BlockMask.{function.__name__}"
    return function


def mask_method(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a `method` that makes a mask `on_one_thread`; in compiled code the mask is a constant."""
    return constant_when_compiled(on_one_thread(method(function)))

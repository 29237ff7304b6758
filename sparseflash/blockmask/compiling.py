"""Masks that are built inside a function that `torch.compile` compiles: constants of the compiled code.

A builder counts tiles and compares them, which no compiler can trace. But a mask of a known rule depends on a few
numbers alone. So while Dynamo traces a function a builder runs as it always does, once, and the compiled code keeps the
mask. Sizes of tensors among its arguments become guards: another length compiles anew, with another mask.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask.cache import cleared_with_caches

P = ParamSpec("P")
T = TypeVar("T")

MOST_KEPT = 256  # masks; code whose mask is forgotten compiles again


class _Kept:
    """The masks that compiled code refers to, as attributes, the oldest first; they outlive that code.

    Dynamo guards the attributes of a global object as it does those of the caller's own objects. What a function marked
    constant returns it cannot guard, so that not even a method of it could be called.
    """


_kept = _Kept()
_numbers = itertools.count()


@cleared_with_caches
def clear() -> None:
    """Forgets the masks; the code that refers to them compiles again."""
    vars(_kept).clear()


def constant_when_compiled(build: Callable[P, T]) -> Callable[P, T]:
    """Decorates a builder of masks: compiled code that calls it gets a constant, made when it is compiled.

    Its arguments may then be numbers, strings, lists of them, functions and masks. A mask that comes from outside is
    guarded: another one compiles anew. Tensors are refused, whose contents a constant would not follow.
    """

    @functools.wraps(build)
    def built(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_dynamo_compiling():
            return build(*args, **kwargs)
        # What follows is traced by Dynamo, all but `_build`.
        masks: list[Any] = []
        positional = [_described(value, masks) for value in args]
        named = {name: _described(value, masks) for name, value in kwargs.items()}
        mask: T = getattr(_kept, _build(build, positional, named, *masks))
        return mask

    return built


def constant_if_its_mask_is(method: Callable[P, T]) -> Callable[P, T]:
    """Decorates a method of masks that can be traced: compiled code gets a constant only of a mask that is one."""
    constant = constant_when_compiled(method)

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling() and hasattr(args[0], "_is_constant"):
            return constant(*args, **kwargs)
        return method(*args, **kwargs)

    return called


def _described(value: Any, masks: list[Any]) -> tuple[str, Any]:
    """An argument in what Dynamo can make a constant of; masks are put aside, because Dynamo guards them one by one."""
    from sparseflash.blockmask.mask import BlockMask

    if isinstance(value, BlockMask):
        masks.append(value)
        return "mask", len(masks) - 1
    if isinstance(value, (Tensor, np.ndarray)):
        return "tensor", None
    if isinstance(value, list):
        return "list", [_described(each, masks) for each in value]
    if isinstance(value, tuple):
        return "tuple", [_described(each, masks) for each in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return "constant", operator.index(value)  # which specialises the size of a tensor, and guards it
    return "constant", value


def _build(build: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], *masks: Any) -> str:
    """Builds the mask and keeps it; returns the name of the attribute."""

    def argument(described: tuple[str, Any]) -> Any:
        kind, value = described
        if kind == "tensor":
            raise TypeError(
                f"{build.__qualname__} must be called outside of what torch.compile compiles if a tensor or array is "
                "among its arguments: inside, the mask is a constant of the compiled code. Make it before, and pass it "
                "to the compiled function."
            )
        if kind == "mask":
            if "q_len" not in vars(masks[value]):  # Dynamo knows its fields, but there is no such object yet
                raise TypeError(
                    f"{build.__qualname__} must be given masks that exist when torch.compile compiles it; got one that "
                    "the compiled code makes at each call (chosen from data, or of with_lengths). Combine such a mask "
                    "with others outside, or take with_lengths last."
                )
            return masks[value]
        if kind == "list":
            return [argument(each) for each in value]
        return tuple(argument(each) for each in value) if kind == "tuple" else value

    made = build(*map(argument, args), **{name: argument(each) for name, each in kwargs.items()})
    if hasattr(made, "__dict__"):
        made.__dict__["_is_constant"] = True
    while len(vars(_kept)) >= MOST_KEPT:
        delattr(_kept, next(iter(vars(_kept))))
    name = f"mask_{next(_numbers)}"
    setattr(_kept, name, made)
    return name


# The mark of `torch.compiler.assume_constant_result`, without the second that importing the compiler costs.
_build._dynamo_marked_constant = True  # type: ignore[attr-defined]

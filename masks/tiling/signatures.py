"""Decorates the library's patterns: small masks made of numbers are kept, and masks are constants in compiled code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.by_name import by_name
from sparseflash.blockmask.cache import SMALL_MASK, BoundedDict
from sparseflash.blockmask.compiling import constant_when_compiled, is_faking
from sparseflash.blockmask.recorded import answer, are_runs_recorded, is_recorded
from sparseflash.blockmask.threads import on_one_thread

P = ParamSpec("P")

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
        if are_runs_recorded():
            return build(*args, **kwargs)
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

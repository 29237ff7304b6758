"""Masks built inside a function that `torch.compile` compiles, or `torch.export` exports, become constants.

A builder counts and compares tiles, which a compiler cannot trace. But the mask of a given rule depends only on a few
numbers. So a builder that is traced runs normally, once, and the compiled code refers to its mask. Tensor sizes among
the arguments become guards: another length recompiles, with another mask. Masks built under `FakeTensorMode` have
contents.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functionaltensor, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from sparseflash.blockmask.cache import cleared_with_caches
from sparseflash.blockmask.compiled_rules import Trace, begin_trace, constant, guard_reads

P = ParamSpec("P")
T = TypeVar("T")

MOST_KEPT = 256  # masks; dropping one makes the code that uses it recompile

_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY

# Dynamo passes existing objects to a function that is marked constant, and guards their identity. Dynamo of PyTorch
# 2.11 cannot, but it passes their ids, and guards the identity of each object whose id was taken.
_OBJECTS_AS_IDS = torch.__version__ < "2.12"


class _Kept:
    """Dynamo guards the attributes of a global object as it guards the caller's objects. It cannot guard the return
    value of a function that is marked constant, so compiled code could not even call a method of it.
    """


_kept = _Kept()
_numbers = itertools.count()


@cleared_with_caches
def clear() -> None:
    """Drops the masks; code that refers to them recompiles."""
    vars(_kept).clear()


def is_faking() -> bool:
    """Whether new tensors are fake, without contents (`FakeTensorMode`, which torch.export uses), or are recorded, so
    that their contents may not be read (`make_fx`).
    """
    mode = torch._C._get_dispatch_mode
    return not torch.compiler.is_dynamo_compiling() and (mode(_FAKE) is not None or mode(_PROXY) is not None)


def is_transforming() -> bool:
    """Whether new tensors are wrapped: inside the transforms of `torch.func`, and `torch.vmap`."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def contents_when_faking() -> AbstractContextManager[Any]:
    """A context in which new tensors have contents, even if `is_faking` or `is_transforming`."""
    if is_faking():
        return _disable_current_modes()
    return temporarily_clear_interpreter_stack() if is_transforming() else nullcontext()


def constant_when_compiled(build: Callable[P, T], calls: Callable[..., None] | None = None) -> Callable[P, T]:
    """Decorates a builder of masks: in compiled code its result is a constant, made at compile time.

    Arguments may then be numbers, strings, lists of these, functions and masks. Another mask from outside the compiled
    function recompiles. Tensors are refused, because the constant would not follow their contents. calls: a function of
    the same arguments that calls the functions among them, so that Dynamo guards the numbers that they read.
    """

    @functools.wraps(build)
    def built(*args: P.args, **kwargs: P.kwargs) -> T:
        if not (torch.compiler.is_compiling() or is_faking()):
            if not is_transforming():
                return build(*args, **kwargs)
            with contents_when_faking():
                args, kwargs = tree_map(partial(_untransformed, build), (args, kwargs))
                return build(*args, **kwargs)
        if not torch.compiler.is_dynamo_compiling():  # FakeTensorMode, or torch.export, which uses it, or make_fx
            _check_contents(build, (args, kwargs))
            with _disable_current_modes():
                return build(*args, **kwargs)
        begun = None
        if calls is not None:
            begun = begin_trace()
            calls(*args, **kwargs)
        masks: list[Any] = []
        positional = [_described(value, masks) for value in args]
        named = {name: _described(value, masks) for name, value in kwargs.items()}
        mask: T = getattr(_kept, _build(begun, build, positional, named, *masks))
        return mask

    return built


def constant_if_its_mask_is(method: Callable[P, T]) -> Callable[P, T]:
    """Decorates a traceable method of masks: its result is a constant in compiled code only if the mask is."""
    of_constant = constant_when_compiled(method)

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling() and hasattr(args[0], "_is_constant"):
            return of_constant(*args, **kwargs)
        return method(*args, **kwargs)

    return called


def _check_contents(build: Callable[..., Any], arguments: Any) -> None:
    """Raises TypeError if any tensor, alone or in a mask, is fake or recorded."""
    recording = torch._C._get_dispatch_mode(_PROXY)

    def is_recorded(x: Tensor) -> bool:
        from torch.fx.experimental.proxy_tensor import has_proxy_slot  # slow to import, and imported where it recorded

        return recording is not None and has_proxy_slot(x, recording.tracer)

    if any(isinstance(x, FakeTensor) or is_recorded(x) for x in _tensors_of(arguments)):
        raise TypeError(
            f"{build.__qualname__} must be given contents; got a fake tensor (of torch.export or FakeTensorMode), "
            "a tensor that make_fx records, or a mask of them. In an exported program a mask is a constant: build it "
            "outside. Masks chosen from data (top_k_blocks and others) and with_lengths, called last, follow "
            "their inputs."
        )


def _untransformed(build: Callable[..., Any], value: Any) -> Any:
    """A tensor without the wrappers of `torch.func`'s transforms, a mask of such tensors, or another value as it is."""
    from sparseflash.blockmask.mask import BlockMask

    if isinstance(value, BlockMask):
        arrays = [_untransformed(build, x) for x in value._arrays()]
        same = all(mine is theirs for mine, theirs in zip(arrays, value._arrays()))
        return value if same else type(value)(*value._numbers(), *arrays, dynamic=value.dynamic)
    while isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
        if is_batchedtensor(value):
            raise TypeError(
                f"{build.__qualname__} must be given tensors that torch.vmap does not map, and masks of them: one "
                "mask serves the whole batch. Build the masks outside and combine them with masks.per_batch."
            )
        if is_functionaltensor(value):
            torch._sync(value)  # type: ignore[attr-defined, no-untyped-call]
        value = get_unwrapped(value)
    return value


def _tensors_of(arguments: Any) -> Iterator[Tensor]:
    """The tensors among the arguments, and those of the masks among them."""
    from sparseflash.blockmask.mask import BlockMask

    for leaf in tree_leaves(arguments):
        yield from (x for x in (leaf._arrays() if isinstance(leaf, BlockMask) else (leaf,)) if isinstance(x, Tensor))


def _described(value: Any, masks: list[Any]) -> tuple[str, Any]:
    from sparseflash.blockmask.mask import BlockMask

    if isinstance(value, BlockMask):
        masks.append(id(value) if _OBJECTS_AS_IDS else value)
        return "mask", len(masks) - 1
    if isinstance(value, (Tensor, np.ndarray)):
        return "tensor", None
    if isinstance(value, list):
        return "list", [_described(each, masks) for each in value]
    if isinstance(value, tuple):
        return "tuple", [_described(each, masks) for each in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return "constant", operator.index(value)
    return "constant", value


def _build(
    begun: Trace | None, build: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], *masks: Any
) -> str:  # fmt: skip
    from sparseflash.blockmask.mask import BlockMask

    if begun is not None:
        guard_reads(begun, build.__qualname__)
    if _OBJECTS_AS_IDS:  # the ids of objects that Dynamo holds, even of objects that it only traces
        masks = tuple(ctypes.cast(address, ctypes.py_object).value for address in masks)

    def argument(described: tuple[str, Any]) -> Any:
        kind, value = described
        if kind == "tensor":
            raise TypeError(
                f"{build.__qualname__} must be called outside of compiled code if a tensor or array is "
                "among its arguments: inside, the mask is a constant of the compiled code. Build it outside and pass "
                "it to the compiled function."
            )
        if kind == "mask":
            if "q_len" not in vars(masks[value]):  # traced from its fields; the object does not exist yet
                raise TypeError(
                    f"{build.__qualname__} must be given masks that exist when torch.compile compiles it; got one that "
                    "the compiled code makes at each call (chosen from data, or by with_lengths). Combine that mask "
                    "with others outside, or call with_lengths last. To always choose some blocks, give them a score "
                    "of infinity."
                )
            return masks[value]
        if kind == "list":
            return [argument(each) for each in value]
        return tuple(argument(each) for each in value) if kind == "tuple" else value

    made = build(*map(argument, args), **{name: argument(each) for name, each in kwargs.items()})
    if isinstance(made, BlockMask):
        made = made._padded(made.lengths)  # others may hold the one that was made
        made.__dict__["_is_constant"] = True
    while len(vars(_kept)) >= MOST_KEPT:
        delattr(_kept, next(iter(vars(_kept))))
    name = f"mask_{next(_numbers)}"
    setattr(_kept, name, made)
    return name


constant(_build)

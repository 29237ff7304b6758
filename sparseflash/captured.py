"""What a function reads besides its arguments: a mask that was made with it is out of date once that changes."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor

_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class Captured:
    """The values that functions and containers hold now.

    >>> table = torch.zeros(4)
    >>> rule = functools.partial(lambda table, q, k: table[q] == table[k], table)
    >>> before = Captured(rule)
    >>> before.is_still(Captured(rule))
    True
    >>> _ = table.add_(1)
    >>> before.is_still(Captured(rule))
    False

    Seen are numbers, texts and tensors (also changed in place) in closures, defaults, arguments of `partial`, global
    variables, containers, and attributes of objects by the names that the functions use. Of other objects only the
    identity is seen.
    """

    def __init__(self, *held: Any) -> None:
        self._objects: list[Any] = []  # compared by identity, and kept, so that no other object gets their place
        self._values: list[Any] = []
        self._seen: set[int] = set()
        for each in held:
            self._visit(each, frozenset())

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in self._objects if isinstance(x, Tensor)]

    def is_still(self, now: Captured) -> bool:
        return (
            len(self._objects) == len(now._objects)
            and all(a is b for a, b in zip(self._objects, now._objects, strict=True))
            and self._values == now._values
        )

    def _visit(self, x: Any, names: frozenset[str]) -> None:
        if isinstance(x, _VALUES):
            self._values += type(x), x
            return
        if isinstance(x, types.MethodType):  # a new object whenever it is asked for
            self._visit(x.__func__, names)
            self._visit(x.__self__, names | _names(x.__func__))
            return
        if id(x) in self._seen:
            return
        self._seen.add(id(x))
        self._objects.append(x)
        if isinstance(x, Tensor):
            self._values.append(object() if x.is_inference() else x._version)
        elif isinstance(x, (list, tuple, set, frozenset)):
            self._all(x, names)
        elif isinstance(x, dict):
            self._all(x.values(), names)
        elif isinstance(x, functools.partial):
            self._all((x.func, x.args, x.keywords), names)
        elif isinstance(x, types.FunctionType):
            self._function(x)
        elif isinstance(x, types.ModuleType):
            if not _is_library(x.__name__):
                self._all((vars(x)[name] for name in sorted(names & vars(x).keys())), names)
        elif not isinstance(x, (type, types.BuiltinFunctionType)):
            self._object(x, names)

    def _all(self, held: Any, names: frozenset[str]) -> None:
        for each in held:
            self._visit(each, names)

    def _function(self, x: types.FunctionType) -> None:
        names, module = _names(x), x.__module__ or ""
        if module.partition(".")[0] == "sparseflash":
            return
        for cell in x.__closure__ or ():
            try:
                self._visit(cell.cell_contents, names)
            except ValueError:  # not yet assigned
                self._values.append("empty")
        self._all((x.__defaults__, x.__kwdefaults__), names)
        if not _is_library(module):
            self._all((x.__globals__[name] for name in sorted(names & x.__globals__.keys())), names)

    def _object(self, x: Any, names: frozenset[str]) -> None:
        kind, before = type(x), frozenset[str]()
        names = names | {"__call__"}
        while names != before:  # methods and properties read further attributes
            before = names
            for name in sorted(names):
                found = getattr(kind, name, None)
                found = found.fget if isinstance(found, property) else found
                if isinstance(found, types.FunctionType):
                    self._visit(found, names)
                    names = names | _names(found)
        held = dict(getattr(x, "__dict__", {}))
        if isinstance(x, torch.nn.Module):
            held |= {**x._parameters, **x._buffers, **x._modules}
        self._all((held[name] for name in sorted(names & held.keys())), names)


def _is_library(name: str) -> bool:
    return name.partition(".")[0] in ("numpy", "sparseflash", "torch")


def _names(function: Any) -> frozenset[str]:
    return _names_of(getattr(function, "__code__", None))


def _names_of(code: Any) -> frozenset[str]:
    if not isinstance(code, types.CodeType):
        return frozenset()
    return frozenset(code.co_names).union(*map(_names_of, code.co_consts))

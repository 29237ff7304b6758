"""What a function reads besides its arguments: a mask that was made with it is out of date once that changes."""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections import UserDict, UserList
from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparseflash.blockmask.cache import bounded

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

    It looks at numbers, strings, arrays and tensors in closures, defaults, arguments of `partial`, global variables and
    containers, and at attributes of objects and classes by the names that the user's own functions use; not into
    installed code. It notices tensors that changed in place, except by writes that PyTorch does not count, through
    `.data` or NumPy. Objects that it cannot look into count as changed if they have no hash, as a `deque`; others are
    compared by identity. The functions that it is given are compared by `==`.
    """

    def __init__(self, *held: Any) -> None:
        self._held = held
        self._names: set[str] = set()  # used by any function: one may pass what it captures to another
        known = -1
        while known < len(self._names):
            known = len(self._names)
            self._objects: list[Any] = []  # compared by identity, and kept, so that no other object gets their place
            self._values: list[Any] = []
            self._seen: set[int] = set()
            self._all(held)

    @property
    def tensors(self) -> list[Tensor]:
        return list({id(x): x for x in self._objects if isinstance(x, Tensor)}.values())

    def is_still(self, now: Captured) -> bool:
        return (
            self._held == now._held
            and len(self._objects) == len(now._objects)
            and all(a is b for a, b in zip(self._objects, now._objects, strict=True))
            and self._values == now._values
        )

    def _visit(self, x: Any) -> None:
        if isinstance(x, _VALUES):
            self._values += type(x), x
            return
        if isinstance(x, types.MethodType):  # a new object whenever it is asked for
            self._all((x.__func__, x.__self__))
            return
        if not any([x is each for each in self._held]):
            self._objects.append(x)
        if id(x) in self._seen:
            return
        self._seen.add(id(x))
        if isinstance(x, Tensor):
            self._values.append(object() if x.is_inference() else x._version)
        elif isinstance(x, np.ndarray):
            self._values.append(object() if x.dtype.hasobject else (x.shape, x.dtype, x.tobytes()))
        elif isinstance(x, (list, tuple, set, frozenset)):
            self._values.append(len(x))
            self._all(x)
        elif isinstance(x, dict):
            self._all(x)
            self._all(x.values())
        elif isinstance(x, functools.partial):
            self._all((x.func, x.args, x.keywords))
        elif isinstance(x, types.FunctionType):
            self._function(x)
        elif isinstance(x, types.BuiltinFunctionType):
            self._visit(x.__self__)
        elif isinstance(x, types.ModuleType):
            if not _is_library(x.__name__):
                self._named(vars(x), self._names)
        elif isinstance(x, type):
            self._class(x)
        else:
            self._object(x)

    def _all(self, held: Iterable[Any]) -> None:
        for each in held:
            self._visit(each)

    def _named(self, held: Mapping[str, Any], names: Set[str]) -> None:
        found = sorted(held.keys() & names)
        self._values.append(found)
        self._all(held[name] for name in found)

    def _function(self, x: types.FunctionType) -> None:
        module = x.__module__ or ""
        if module.partition(".")[0] == "sparseflash":
            return
        self._objects.append(x.__code__)  # which a notebook that loads a module again replaces
        for cell in x.__closure__ or ():
            try:
                self._visit(cell.cell_contents)
            except ValueError:  # not yet assigned
                self._values.append("empty")
        self._all((x.__defaults__, x.__kwdefaults__))
        if not _is_library(module):
            names = _names_of(x.__code__)
            self._names |= names
            self._named(x.__globals__, names)
            self._named(x.__dict__, self._names)

    def _class(self, x: type) -> list[str]:
        """Visits the attributes; returns the names of slots."""
        slots = []
        for base in x.__mro__:
            if _is_library(base.__module__):
                continue
            for name in sorted(vars(base).keys() & (self._names | _BY_OPERATORS)):
                found = vars(base)[name]
                if isinstance(found, types.MemberDescriptorType):
                    slots.append(name)
                elif isinstance(found, property | staticmethod | classmethod):
                    self._visit(found.fget if isinstance(found, property) else found.__func__)
                else:
                    self._visit(found)
        return slots

    def _object(self, x: Any) -> None:
        kind = type(x)
        names = self._names | {"data"} if isinstance(x, (UserDict, UserList)) else self._names
        held = {name: getattr(x, name, None) for name in self._class(kind)}
        if isinstance(own := getattr(x, "__dict__", None), dict):
            held |= own
        if isinstance(x, nn.Module):
            held |= (children := {**x._parameters, **x._buffers, **x._modules})
            names = names | children.keys() if isinstance(x, _LISTS) else names
        elif getattr(x, "__hash__", None) is None and not hasattr(x, "__dict__") and not hasattr(kind, "__slots__"):
            self._values.append(object())
        self._named(held, names)


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
# Methods that Python calls without their names.
_BY_OPERATORS = frozenset(
    ("__call__", "__getattr__", "__getitem__", "__contains__", "__iter__", "__next__", "__len__", "__bool__", "__int__",
     "__index__", "__float__")
)  # fmt: skip


_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


@bounded(maxsize=1024)
def _is_library(name: str) -> bool:
    """Whether a module is not the user's own. What installed code reads leads to nearly every object there is."""
    if name == "__main__":  # its file may be that of cProfile or a launcher
        return False
    package = name.partition(".")[0]
    if package in ("numpy", "sparseflash", "torch") or package in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and file.startswith(_INSTALLED)


def _names_of(x: Any) -> frozenset[str]:
    """Of attributes and global variables, and of texts: getattr(x, "name")."""
    if type(x) is str:
        return frozenset([x] if x.isidentifier() else [])
    if type(x) is tuple:
        return frozenset().union(*map(_names_of, x))
    if not isinstance(x, types.CodeType):
        return frozenset()
    return frozenset(x.co_names).union(*map(_names_of, x.co_consts))

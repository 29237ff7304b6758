"""Reads a pickle of plain values and byte arrays without unpickling, which could run code named in the file.

This reader runs the few instructions that the Python 2 pickles of CIFAR-10 need, and refuses all others.
"""

from __future__ import annotations

import math
import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np

_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES",
}  # fmt: skip
_STRINGS = {"SHORT_BINSTRING", "BINSTRING"}  # strings of Python 2, which are bytes
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_SKIPPED = {"PROTO", "FRAME"}


@dataclass
class _Global:
    name: str


@dataclass
class _DType:
    name: str


class _Array:
    """Its contents follow later in the file."""


_RECONSTRUCT = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
_NEEDED = {*_RECONSTRUCT, "numpy.ndarray", "numpy.dtype", "_codecs.encode"}


def read(contents: bytes) -> Any:
    """Arrays are uint8 and read-only.

    >>> import pickle
    >>> read(pickle.dumps({b"labels": [3, 4], b"data": np.arange(4, dtype=np.uint8)}, protocol=2))
    {b'labels': [3, 4], b'data': array([0, 1, 2, 3], dtype=uint8)}
    """
    try:
        return _followed(contents)
    except (IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from None


def _followed(contents: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        first = marks.pop()
        taken = stack[first:]
        del stack[first:]
        return taken

    for opcode, argument, _ in pickletools.genops(contents):
        name = opcode.name
        if name in _SKIPPED:
            continue
        if name in _VALUES:
            stack.append(argument)
        elif name in _STRINGS:
            stack.append(argument.encode("latin-1"))
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"):
            stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name in ("APPEND", "APPENDS"):
            added = since_mark() if name == "APPENDS" else [stack.pop()]
            _of_type(stack[-1], list).extend(added)
        elif name in ("SETITEM", "SETITEMS"):
            added = since_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            for key, value in zip(added[::2], added[1::2], strict=True):
                _of_type(stack[-1], dict)[_of_type(key, (str, bytes))] = value
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_known(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            stack[-2:] = [_known(*stack[-2:])]
        elif name == "REDUCE":
            stack[-2:] = [_called(*stack[-2:])]
        elif name == "BUILD":
            stack[-2:] = [_built(*stack[-2:])]
        elif name == "STOP":
            return stack.pop()
        else:
            raise ValueError(f"it has the instruction {name}, which arrays of bytes do not need")
    raise ValueError("it ends too early")


def _of_type(value: Any, wanted: Any) -> Any:
    if not isinstance(value, wanted):
        raise ValueError(f"it has a {type(value).__name__} where another type is needed")
    return value


def _known(module: str, name: str) -> _Global:
    full = f"{_of_type(module, str)}.{_of_type(name, str)}"
    if full not in _NEEDED:
        raise ValueError(f"it asks for {full[:60]}, which arrays of bytes do not need")
    return _Global(full)


def _called(function: _Global, arguments: tuple[Any, ...]) -> Any:
    if function.name in _RECONSTRUCT:
        return _Array()
    if function.name == "numpy.dtype":
        code = _of_type(arguments[0], (str, bytes))
        return _DType(code.decode("latin-1") if isinstance(code, bytes) else code)
    if function.name == "_codecs.encode" and arguments[1] == "latin1":
        return _of_type(arguments[0], str).encode("latin-1")
    raise ValueError(f"it calls {function.name}, which arrays of bytes do not need")


def _built(value: Any, state: tuple[Any, ...]) -> Any:
    if isinstance(value, _DType):
        return value
    _of_type(value, _Array)
    _, shape, dtype, by_columns, data = state
    if _of_type(dtype, _DType).name != "u1" or by_columns or not isinstance(data, bytes):
        raise ValueError(f"it must have arrays of bytes, in rows; got the type {dtype.name[:60]}")
    # A list's repr could fill the memory.
    if not all(type(n) is int and n >= 0 for n in _of_type(shape, tuple)) or math.prod(shape) != len(data):
        raise ValueError(f"it is damaged: the shape of an array does not fit its {len(data)} bytes")
    return np.frombuffer(data, np.uint8).reshape(shape)

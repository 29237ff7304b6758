"""Starts compiled kernels through the CUDA driver by `ctypes`: what `native.c` must do."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64  # of descriptors
_PLAIN = (Tensor, torch.nn.Parameter)
# One value of a call: where it is written, how (a format character of Python's struct, P for a tensor's address, D for
# the address in a descriptor), the slot of its argument, and the indices in it if it is a tuple or holds some, or -1.
Value = tuple[int, str, int, int, int]


class Kernel:
    """A compiled kernel with its parameters, except for the values that each call gives."""

    def __init__(
        self, function: int, launch: int, replace: int, resident: bool, programs: int, threads: int, shared: int,
        contents: bytes, parameters: tuple[int, ...], values: tuple[Value, ...], names: tuple[str, ...],
    ) -> None:  # fmt: skip
        """function, launch, replace: addresses; the last two of functions of the driver. resident: whether `launch` is
        cuLaunchCooperativeKernel. contents: descriptors, then eight bytes for each other parameter. parameters:
        their offsets. values: in the order of slots, those that are no descriptors eight bytes apart. names: of the
        slots."""
        self._made = function, launch, replace, resident
        self.programs, self._block = programs, (threads, 1, 1, shared)
        self._parameters, self._values, self._names = parameters, values, names
        self._size, self._lock = len(contents), threading.Lock()  # held until the launch has copied the parameters
        self._memory = ctypes.create_string_buffer(len(contents) + _ALIGNMENT)
        self._skipped = -ctypes.addressof(self._memory) % _ALIGNMENT
        self._start = ctypes.addressof(self._memory) + self._skipped
        ctypes.memmove(self._start, contents, len(contents))
        self._addresses = (ctypes.c_void_p * len(parameters))(*(self._start + offset for offset in parameters))
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        extra = () if resident else (pointer,)
        self._launch = ctypes.CFUNCTYPE(ctypes.c_int, pointer, *[number] * 7, pointer, pointer, *extra)(launch)
        self._last = (None,) * len(extra)
        self._replace = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer)(replace)
        self._function = ctypes.c_void_p(function)
        self._write = [(offset, *_writer(code), slot, item, inner) for offset, code, slot, item, inner in values]

    def bound(self, programs: int, given: tuple[Any, ...]) -> Kernel:
        left = tuple([(*each[:2], each[2] - len(given), *each[3:]) for each in self._values if each[2] >= len(given)])
        contents = ctypes.string_at(self._start, self._size)
        made = Kernel(
            *self._made, programs, self._block[0], self._block[3], contents, self._parameters, self._values,
            self._names,
        )  # fmt: skip
        made._fill([each for each in made._write if each[3] < len(given)], given)
        made._values, made._names = left, self._names[len(given) :]
        made._write = [(*each[:3], each[3] - len(given), *each[4:]) for each in made._write if each[3] >= len(given)]
        return made

    def start(self, programs: int, given: Mapping[str, Any] | Sequence[Any], stream: int) -> tuple[int, int] | None:
        with self._lock:
            self._fill(self._write, given)
            status = self._launch(self._function, programs, 1, 1, *self._block, stream, self._addresses, *self._last)
        return None if status == 0 else (0, status)

    def _fill(self, writes: Sequence[Any], given: Mapping[str, Any] | Sequence[Any]) -> None:
        names = self._names if isinstance(given, dict) else None
        for offset, pack, is_address, slot, item, inner in writes:
            x: Any = given[slot if names is None else names[slot]]
            if item >= 0:
                x = x[item]
                if inner >= 0:
                    x = x[inner]
            if is_address:
                x = x.data_ptr()
            if pack is None:
                self._replace(self._start + offset, x)
            else:
                pack(self._memory, self._skipped + offset, x)


def start(
    kernels: tuple[Kernel, ...], given: Mapping[str, Any] | Sequence[Any], stream: int
) -> tuple[int, int] | None:  # fmt: skip
    """Starts kernels one after another on a stream of the current device.

    given: the arguments of all kernels, by the names of slots, or of one kernel, in the order of its slots. Returns
    None, or how many kernels were started and the driver's status if it refuses one.
    """
    for place, kernel in enumerate(kernels):
        failed = kernel.start(kernel.programs, given, stream)
        if failed is not None:
            return place, failed[1]
    return None


def _writer(code: str) -> tuple[Callable[..., None] | None, bool]:
    """`(function that writes a value, or None for a descriptor; whether the value is a tensor's address)`."""
    if code == "D":
        return None, True
    return struct.Struct("=Q" if code == "P" else f"={code}").pack_into, code == "P"


def layouts(*tensors: Tensor) -> Any:
    """A key for the layouts of tensors: shape, strides, dtype, device, and the address modulo 16.

    None if a tensor has no memory of its own, or is of a class that may override operators.
    """
    found: list[Any] = []
    for x in tensors:
        if type(x) not in _PLAIN or x.is_meta or x.is_neg():
            return None
        try:
            found += x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16
        except RuntimeError:  # a sparse or nested tensor, without strides or memory
            return None
    return tuple(found)

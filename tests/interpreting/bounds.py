"""Checks that kernels read and write only their arguments, in the interpreter.

A GPU stops only at an address outside all allocated pages. The interpreter reads the host's memory, where nearly every
address is valid. So every address is looked up.
"""

from bisect import bisect_right

import numpy as np
import torch
from triton.runtime import interpreter

least, most = np.minimum.reduce, np.maximum.reduce


def watch_addresses(monkeypatch):
    """The interpreter then stops at an address outside the tensors that the kernel was given."""
    call = interpreter.GridExecutor.__call__
    load, store = (getattr(interpreter.InterpreterBuilder, f"create_masked_{way}") for way in ("load", "store"))
    arguments = Extents([])

    def watched_call(self, *args, **kwargs):
        nonlocal arguments
        outside, arguments = arguments, Extents(tensors_in([*args, *kwargs.values()]))
        try:
            return call(self, *args, **kwargs)
        finally:
            arguments = outside

    def watched_load(self, pointers, mask, other, *args, **kwargs):
        arguments.check(pointers, mask, "reads")
        return load(self, pointers, mask, other, *args, **kwargs)

    def watched_store(self, pointers, value, mask, *args, **kwargs):
        arguments.check(pointers, mask, "writes")
        return store(self, pointers, value, mask, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", watched_call)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", watched_load)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_store", watched_store)


class Extents:
    """The addresses of some tensors, each from its first element to its last."""

    def __init__(self, tensors):
        found = sorted(extent(x) for x in tensors if x.numel() > 0)
        self._start = np.array([start for start, _ in found], dtype=np.uint64)
        # All tensors that start no later, because views of one buffer overlap.
        self._stop = np.maximum.accumulate(np.array([stop for _, stop in found], dtype=np.uint64))
        self._starts, self._stops = self._start.tolist(), self._stop.tolist()

    def check(self, pointers, mask, does):
        # Descriptors of Triton 3.7 pass an array, whose `data` is its memory.
        live = mask if isinstance(mask, np.ndarray) else mask.data
        at = pointers.data
        if not live.all():
            at = at[np.broadcast_to(live.astype(bool), at.shape)]
            if at.size == 0:
                return
        size = pointers.get_element_ty().primitive_bitwidth // 8
        first = bisect_right(self._starts, least(at, None).item())
        if first > 0 and most(at, None).item() + size <= self._stops[first - 1]:
            return  # all in one tensor, the usual case
        at, size = at.astype(np.uint64), np.uint64(size)
        before = np.searchsorted(self._start, at, side="right")
        inside = before > 0
        inside[inside] = at[inside] + size <= self._stop[before[inside] - 1]
        if not inside.all():
            raise IndexError(f"a kernel {does} {np.sum(~inside)} of {at.size} numbers outside its arguments")


def extent(x):
    """The addresses of a tensor's first byte, and of the byte after its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def tensors_in(arguments):
    for x in arguments:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from tensors_in(x)
        elif isinstance(getattr(x, "base", None), torch.Tensor):  # a descriptor
            yield x.base

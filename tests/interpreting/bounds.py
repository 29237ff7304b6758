"""Checks that kernels read and write only their arguments, in the interpreter.

A GPU stops only outside allocated pages, and nearly every address of the host is valid.
"""

from bisect import bisect_right

import numpy as np
import torch
from triton.runtime import interpreter

least, most = np.minimum.reduce, np.maximum.reduce


def watch_addresses(monkeypatch):
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
    def __init__(self, tensors):
        found = sorted(extent(x) for x in tensors if x.numel() > 0)
        self._start = np.array([start for start, _ in found], dtype=np.uint64)
        # All that start no later: views of one buffer overlap.
        self._stop = np.maximum.accumulate(np.array([stop for _, stop in found], dtype=np.uint64))
        self._starts, self._stops = self._start.tolist(), self._stop.tolist()

    def check(self, pointers, mask, does):
        live = mask if isinstance(mask, np.ndarray) else mask.data
        at = pointers.data
        if not live.all():
            at = at[np.broadcast_to(live.astype(bool), at.shape)]
            if at.size == 0:
                return
        size = pointers.get_element_ty().primitive_bitwidth // 8
        first = bisect_right(self._starts, least(at, None).item())
        if first > 0 and most(at, None).item() + size <= self._stops[first - 1]:
            return
        at, size = at.astype(np.uint64), np.uint64(size)
        before = np.searchsorted(self._start, at, side="right")
        inside = before > 0
        inside[inside] = at[inside] + size <= self._stop[before[inside] - 1]
        if not inside.all():
            raise IndexError(f"a kernel {does} {np.sum(~inside)} of {at.size} numbers outside its arguments")


def extent(x):
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

"""Records which masks a function makes. If they differ only in length, few of them are really computed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from sparseflash.blockmask import BlockMask

Family = Callable[..., BlockMask]


class Call(NamedTuple):
    """One call of a family: `family(length, **options)`."""

    family: Family
    length: int
    options: dict[str, Any]
    key: Any  # equal for equal families and options
    mask: BlockMask  # kept, so that no other mask gets its id


class _Recording(NamedTuple):
    families: Collection[Family]
    calls: dict[int, Call]
    known: set[Any]  # keys


class _Thread(threading.local):
    recording: _Recording | None = None


_thread = _Thread()


def is_recorded(family: Family, args: tuple[Any, ...]) -> bool:
    """Whether a call of the family with these positional arguments must go through `answer`."""
    found = _thread.recording
    return found is not None and family in found.families and not any([x is not None for x in args[1:]])


def answer(family: Family, length: int, options: dict[str, Any], key: Any) -> BlockMask:
    """The mask of a call. If an earlier call had the same key, the mask is computed only when it is read.

    The first call of a key computes its mask at once, so wrong options raise inside that call.
    """
    recording = _thread.recording
    assert recording is not None
    make = partial(_unrecorded, family, length, options)
    if key in recording.known:
        mask = object.__new__(BlockMask)
        vars(mask)["_make"] = make
    else:
        mask = make()
    recording.known.add(key)
    recording.calls[id(mask)] = Call(family, length, options, key, mask)
    return mask


def _unrecorded(family: Family, length: int, options: dict[str, Any]) -> BlockMask:
    before, _thread.recording = _thread.recording, None
    try:
        return family(length, **options)
    finally:
        _thread.recording = before


@contextmanager
def recorded(families: Collection[Family]) -> Iterator[dict[int, Call]]:
    """Inside the block, calls of these families are recorded by the ids of the masks that they return. Each options
    of a family must be valid for every length from 1 on, or for none.

    >>> from sparseflash import masks
    >>> with recorded({masks.causal.__wrapped__}) as calls:
    ...     found = [calls[id(mask)] for mask in map(masks.causal, (300, 200))]
    >>> [(call.length, call.options) for call in found]
    [(300, {}), (200, {})]
    """
    calls: dict[int, Call] = {}
    before = _thread.recording
    _thread.recording = _Recording(families, calls, set())
    try:
        yield calls
    finally:
        _thread.recording = before
        masks = [weakref.ref(call.mask) for call in calls.values()]
        calls.clear()
        for mask in masks:
            if (held := mask()) is not None:  # the function kept it, and compiled code needs computed masks
                held._arrays()

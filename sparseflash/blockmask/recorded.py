"""Records which masks a function makes. If they differ only in length, few of them are really computed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from sparseflash.blockmask import BlockMask
from sparseflash.limits import MOST_TOKENS

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
    unlike: frozenset[str]
    calls: dict[int, Call]
    known: set[Any]  # keys


class _Thread(threading.local):
    recording: _Recording | None = None


_thread = _Thread()


def is_recorded(family: Family, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether a call of the family with these arguments must go through `answer`."""
    found = _thread.recording
    if found is None or family not in found.families or not found.unlike.isdisjoint(options):
        return False
    # A call with a wrong length is an error of its own, which the function may handle.
    length = args[0] if args and not any([x is not None for x in args[1:]]) else None
    return type(length) is int and 1 <= length <= MOST_TOKENS


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
def recorded(families: Collection[Family], unlike: frozenset[str] = frozenset()) -> Iterator[dict[int, Call]]:
    """Inside the block, calls of these families with one length are recorded, by the ids of their masks; but not those
    with an option that is in `unlike`. The masks must exist for each length from 1 on, whatever the other options, or
    for none.

    >>> from sparseflash import masks
    >>> with recorded({masks.causal.__wrapped__}) as calls:
    ...     found = [calls[id(mask)] for mask in map(masks.causal, (300, 200))]
    >>> [(call.length, call.options) for call in found]
    [(300, {}), (200, {})]
    """
    calls: dict[int, Call] = {}
    before = _thread.recording
    _thread.recording = _Recording(families, unlike, calls, set())
    try:
        yield calls
    finally:
        _thread.recording = before
        masks = [weakref.ref(call.mask) for call in calls.values()]
        calls.clear()
        for mask in masks:
            if (held := mask()) is not None:  # the function kept it, and compiled code needs computed masks
                held._arrays()

"""Records which masks a function makes. Masks that differ only in length, masks of runs of keys, and stacks of such
masks are computed only when they are read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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


class Runs(NamedTuple):
    """A mask whose query q sees the keys `ends[0, q] <= k < ends[1, q]` and `ends[2, q] <= k < ends[3, q]`."""

    q_len: int
    k_len: int
    block: tuple[int, int]
    ends: NDArray[np.int64]  # [4, q_len], any values


FoundRuns = dict[int, tuple[BlockMask, Runs]]  # by the ids of masks, which are kept so that no other mask gets an id
Stacks = dict[int, tuple[BlockMask, list[BlockMask]]]  # by the ids of stacks, with the masks of their heads


class Recording(NamedTuple):
    """What `recorded` finds."""

    families: Collection[Family]
    unlike: frozenset[str]
    calls: dict[int, Call]  # by the ids of masks
    runs: FoundRuns
    stacks: Stacks
    known: set[Any]  # keys

    def heads_of(self, mask: Any) -> list[BlockMask] | None:
        """The masks of the heads of a stack that has not been computed; None for any other mask."""
        found = self.stacks.get(id(mask))
        return None if found is None or vars(mask)["_make"] is None else found[1]

    def length_of(self, mask: Any) -> int | None:
        """The length of a recorded mask of one head with as many keys as queries; None for others."""
        if (call := self.calls.get(id(mask))) is not None:
            return call.length
        runs = self.runs[id(mask)][1] if id(mask) in self.runs else None
        return runs.q_len if runs is not None and runs.q_len == runs.k_len else None

    def runs_of(self, mask: Any) -> Runs | None:
        """The runs of a mask that has not been computed; None if it has, or if it is another mask."""
        found, call = self.runs, self.calls.get(id(mask))
        if call is not None and id(mask) not in found:
            found = {}
            mask = _alone(partial(call.family, call.length, **call.options), found)
        return found[id(mask)][1] if id(mask) in found and vars(mask)["_make"] is not None else None


class _Thread(threading.local):
    recording: Recording | None = None
    runs: FoundRuns | None = None


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
    make = partial(family, length, **options)
    mask = _later(make) if key in recording.known else _alone(make, recording.runs)
    recording.known.add(key)
    recording.calls[id(mask)] = Call(family, length, options, key, mask)
    return mask


def are_runs_recorded() -> bool:
    """Whether masks of runs are recorded, so that `mask_of_runs` does not compute them."""
    return _thread.runs is not None


def mask_of_runs(runs: Callable[[], Runs | None], make: Callable[[], BlockMask]) -> BlockMask:
    """`make()`; `runs()` are its runs, or None if it has none.

    While masks are recorded, a mask of runs is computed only when it is read.
    """
    if _thread.runs is None or (found := runs()) is None:
        return make()
    mask = _later(make)
    _thread.runs[id(mask)] = mask, found
    return mask


def stack_of(masks: Any, make: Callable[[Any], BlockMask]) -> BlockMask:
    """`make(masks)`, which stacks the heads of a list of masks.

    While masks are recorded, a stack of recorded masks of one length is computed only when it is read.
    """
    recording = _thread.recording
    if recording is None or not isinstance(masks, (list, tuple)):
        return make(masks)
    lengths = {recording.length_of(mask) for mask in masks}
    if len(lengths) != 1 or None in lengths:
        return make(masks)
    of_heads = list(masks)
    mask = _later(partial(make, of_heads))
    recording.stacks[id(mask)] = mask, of_heads
    return mask


def _later(make: Callable[[], BlockMask]) -> BlockMask:
    mask = object.__new__(BlockMask)
    vars(mask)["_make"] = partial(_alone, make, None)
    return mask


def _alone(make: Callable[[], BlockMask], runs: FoundRuns | None) -> BlockMask:
    """`make()`, recorded only among `runs`."""
    before = _thread.recording, _thread.runs
    _thread.recording, _thread.runs = None, runs
    try:
        return make()
    finally:
        _thread.recording, _thread.runs = before


@contextmanager
def recorded(families: Collection[Family], unlike: frozenset[str] = frozenset()) -> Iterator[Recording]:
    """Records the masks that are made in the `with` block: masks of runs, and calls of these families with one length
    and without an option in `unlike`. With each choice of options, masks must exist for all lengths from 1 on or none.

    >>> from sparseflash import masks
    >>> with recorded({masks.causal.__wrapped__}) as recording:
    ...     found = [recording.calls[id(mask)] for mask in map(masks.causal, (300, 200))]
    >>> [(call.length, call.options) for call in found]
    [(300, {}), (200, {})]
    """
    before = _thread.recording, _thread.runs
    recording = Recording(families, unlike, {}, {}, {}, set())
    _thread.recording, _thread.runs = recording, recording.runs
    try:
        yield recording
    finally:
        _thread.recording, _thread.runs = before
        masks = [weakref.ref(call.mask) for call in recording.calls.values()]
        masks += [weakref.ref(mask) for mask, _ in [*recording.runs.values(), *recording.stacks.values()]]
        recording.calls.clear()
        recording.runs.clear()
        recording.stacks.clear()
        for mask in masks:
            if (held := mask()) is not None:  # the function kept it, and compiled code needs computed masks
                held._arrays()

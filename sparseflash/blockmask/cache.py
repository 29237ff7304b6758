"""The library's caches: what is derived from a mask's arrays, kept with them; and results of functions, bounded.

The registered operator carries only tensors, so what is derived from a mask is cached with one of them, its indices.
Whoever holds the indices finds it, in eager mode, in the backward and under torch.compile, and it dies with the mask.
Nothing in the cache may hold the indices themselves, or neither would ever be freed: `indices.detach()` is another
tensor of the same memory.

A tensor that a compiled graph makes inside caches nothing: its memory, and with it the very same Python object, may
serve another of the graph's tensors a moment later, the indices of another mask among them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparseflash.blockmask import streams
from sparseflash.blockmask.streams import ReadyEvent

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_clearings: list[Callable[[], None]] = []  # what `clear_caches` calls
_dicts: weakref.WeakSet[Any] = weakref.WeakSet()  # every BoundedDict and MaskCache


class BoundedDict(dict[Any, Any]):
    """A dict of at most `most` entries: it starts anew when it is full.

    That is simpler and faster to read than one that knows which entry was used least recently, and whoever needs more
    than `most` different entries in turn needs each of them too seldom to gain from a cache.

    >>> cache = BoundedDict(2)
    >>> for number in range(3):
    ...     _ = cache.put(number, str(number))
    >>> dict(cache)
    {2: '2'}
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        _dicts.add(self)

    def put(self, key: Any, value: T) -> T:
        """Stores and returns the value."""
        if len(self) >= self.most and key not in self:
            self.clear()
        self[key] = value
        return value

    # By identity: a cache is an object in a set of all of them.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class MaskCache(dict[Any, Any]):
    """What has been derived from the arrays of one mask: one entry a kind; what has many is a `BoundedDict`."""

    def __init__(self, *, countable: bool, recorded: bool) -> None:
        super().__init__()
        self.countable = countable
        self.recorded = recorded  # by a CUDA graph: then the arrays are another mask's after each replay
        _dicts.add(self)

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def bounded(maxsize: int) -> Callable[[F], F]:
    """`functools.lru_cache` that `clear_caches` empties."""

    def decorate(function: F) -> F:
        cached = functools.lru_cache(maxsize=maxsize)(function)
        cleared_with_caches(cached.cache_clear)
        return cached  # type: ignore[return-value]

    return decorate


def cleared_with_caches(clear: Callable[[], None]) -> Callable[[], None]:
    """Has `clear_caches` call this."""
    _clearings.append(clear)
    return clear


def clear_caches() -> None:
    """Empties all of sparseflash's caches and frees the memory that only they hold.

    >>> import sparseflash
    >>> sparseflash.clear_caches()

    Every cache is bounded, so this is for measurements of memory, and for programs that will not come back to what
    they did before. Later calls derive and compile again what they need; compiled kernels are read from Triton's cache
    on disk. CUDA graphs stay right: what they read is kept until they are destroyed.

    With each mask, and freed with it: its transpose, density, digest, lists of tiles, 64 execution plans (one for each
    batch size and number of heads) of 64 prepared launches each, and 64 prepared calls. For the process: 64 plans and
    64 prepared calls of dense attention, 16 dense masks of the blockwise backend, kernels prepared for 256 layouts of
    tensors, 512 compiled kernels, 32 sets of tiles that blocks are chosen from at every step and 32 arrays of head
    numbers, 128 sets of kernels that choose, 256 masks made in functions that `torch.compile` has compiled.
    """
    streams.release_finished_graphs()
    for clear in _clearings:
        clear()
    for cache in list(_dicts):
        cache.clear()


def attach_cache(indices: Tensor, *, countable: bool, others: tuple[Any, ...]) -> None:
    """Gives the indices of a mask that has just been made a cache of what will be derived from them.

    `countable`: the host may wait for their numbers, once. It must not for dynamic masks, which are made at every step.
    `others`: what else that mask is made of.
    """
    if torch.compiler.is_compiling():
        # Said of what the compiled code gives back, if it is no dynamic mask: that may cache what is derived later on.
        indices._sparseflash_countable = countable  # type: ignore[attr-defined]
        return
    # What a CUDA graph makes is empty until it is replayed, and another thing after each replay.
    cache = MaskCache(countable=countable, recorded=streams.is_capturing(indices.device))
    indices._sparseflash = cache  # type: ignore[attr-defined]
    indices._sparseflash_others = others  # type: ignore[attr-defined]


def belong_together(indices: Tensor, others: tuple[Any, ...]) -> bool:
    """Whether a mask was made of these indices and just these others, so that its cache is right for them, too."""
    known = getattr(indices, "_sparseflash_others", ())
    return len(known) == len(others) and all(
        a is b if isinstance(a, Tensor) else a == b for a, b in zip(known, others, strict=True)
    )


def mask_cache(indices: Tensor) -> MaskCache:
    """What has been derived from a mask's arrays so far: its transpose, its execution plans, its density."""
    cache: MaskCache | None = getattr(indices, "_sparseflash", None)
    if cache is None:
        if torch.compiler.is_compiling() or not getattr(indices, "_sparseflash_countable", False):
            return MaskCache(countable=False, recorded=False)
        cache = MaskCache(countable=True, recorded=False)
        indices._sparseflash = cache  # type: ignore[attr-defined]
    # While a CUDA graph is recorded, of dynamic masks those are planned that it makes, and at other times the others.
    # The rest is not planned while a graph is recorded: see backends/triton/cuda_graphs.py.
    if cache.countable or cache.recorded == streams.is_capturing(indices.device):
        return cache
    return MaskCache(countable=False, recorded=False)


def is_countable(indices: Tensor) -> bool:
    """Whether the host may wait for their numbers. Not so of what torch.compile makes inside a graph."""
    return mask_cache(indices).countable


def once(cache: dict[Any, Any], key: Any, make: Callable[[], T]) -> T:
    """`cache[key]`, made if it is not there; on whichever CUDA stream."""
    found = cache.get(key)
    if found is None:
        value = make()
        cache[key] = value, ReadyEvent(value)
        return value
    cached: T = found[0]
    found[1].wait()
    return cached

"""The library's caches: data derived from a mask's arrays, kept with the mask, and bounded results of functions.

The registered operator carries only tensors, so data derived from a mask is cached on one of its tensors, the indices:
they are there in eager mode, in the backward and under torch.compile, and the cache is freed with the mask. An entry
must not hold the indices tensor itself, or neither would ever be freed; `indices.detach()` is another tensor over the
same memory.

A tensor made inside a compiled graph must not cache anything: its memory, and with it the same Python object, may later
become another tensor of the graph, such as another mask's indices.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from sparseflash.blockmask import graph_memory, streams
from sparseflash.blockmask.streams import ReadyEvent

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

SMALL_MASK = 1 << 17  # bytes of masks that are kept for later equal ones: 16,384 causal tokens in blocks of 128

_clearings: list[Callable[[], None]] = []  # the functions that `clear_caches` calls
_dicts: weakref.WeakSet[Any] = weakref.WeakSet()
# A WeakSet must not grow while it is read. Reentrant, because the garbage collector may run code that makes a cache.
_listing = threading.RLock()


class BoundedDict(dict[Any, Any]):
    """A dict of at most `most` entries that is emptied when it would exceed them.

    >>> cache = BoundedDict(2)
    >>> for number in range(3):
    ...     _ = cache.put(number, str(number))
    >>> dict(cache)
    {2: '2'}

    Emptying is simpler than evicting the least recently used entry, and reads are faster.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        if not self:
            with _listing:
                _dicts.add(self)
        super().__setitem__(key, value)

    def put(self, key: Any, value: T) -> T:
        self[key] = value
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies are empty: pickle would add entries before `most`, and some cannot be pickled.
        return BoundedDict, (self.most,)

    # Hashed by identity, to be members of a WeakSet.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class MaskCache(dict[Any, Any]):
    """Data derived from the arrays of one mask, one entry a kind; a kind with many values is a `BoundedDict`."""

    def __init__(self, *, may_wait: bool, recorded: bool) -> None:
        super().__init__()
        self.may_wait = may_wait
        self.recorded = recorded  # made while a CUDA graph was recorded: each replay may change the arrays
        with _listing:
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


def bounded_tensors(maxsize: int) -> Callable[[F], F]:
    """`bounded` for a function that makes tensors, called with positional arguments: safe on any CUDA stream."""

    def decorate(function: F) -> F:
        made = BoundedDict(maxsize)

        @functools.wraps(function)
        def cached(*arguments: Any) -> Any:
            found = made.get(arguments)  # as in `once`, but faster, because every choice of blocks comes here
            if found is None:
                return once(made, arguments, lambda: _outside_transforms(function, arguments))
            found[1].wait()
            return found[0]

        return cached  # type: ignore[return-value]

    return decorate


def _outside_transforms(function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    if torch.compiler.is_compiling():
        return function(*arguments)
    with temporarily_clear_interpreter_stack():
        return function(*arguments)


def cleared_with_caches(clear: Callable[[], None]) -> Callable[[], None]:
    """Registers a function for `clear_caches` to call."""
    _clearings.append(clear)
    return clear


def clear_caches() -> None:
    """Empties all of sparseflash's caches and frees the memory that only they hold.

    Every cache is bounded, so this is only needed to measure memory, or in a program that will not repeat earlier work.

    >>> import sparseflash
    >>> sparseflash.clear_caches()

    Later calls derive again what they need; compiled kernels are reloaded from Triton's cache on disk. CUDA graphs stay
    valid: the tensors that they read are kept until they are destroyed.

    Cached with a mask: its transpose, density, digest, tile numbers and work lists, and prepared calls, for up to 64
    batch sizes and numbers of heads and 64 layouts of tensors each. Cached with other objects: masks of a layer of
    `nn`, exchanges of a `ShardPlan` for 64 kinds of calls, codes of a relative table for its last lengths, and
    recordings of a function of scores.

    Cached by the process, 8 to 512 of each kind: calls and plans of dense attention and of decoding; compiled kernels
    and their launches; masks of packed sequences, of Transformers' models and of compiled code; small masks on GPUs;
    tensors for planning and for the choice of blocks.
    """
    graph_memory.release_finished()
    for clear in _clearings:
        clear()
    with _listing:
        caches = list(_dicts)
    for cache in caches:
        cache.clear()


def attach_cache(indices: Tensor, *, may_wait: bool, others: tuple[Any, ...]) -> None:
    """Gives the indices of a newly made mask a cache.

    `may_wait`: whether the host may wait for the indices' values, once; not for dynamic masks, which are made at every
    step.
    """
    if torch.compiler.is_compiling():
        # The mark tells `mask_cache` that the indices which the compiled code returns may get a cache, unless the mask
        # is dynamic.
        indices._sparseflash_may_wait = may_wait  # type: ignore[attr-defined]
        return
    # A tensor made while a graph is recorded has no contents until the first replay, and new ones after each.
    cache = MaskCache(may_wait=may_wait, recorded=streams.is_capturing(indices.device))
    indices._sparseflash = cache  # type: ignore[attr-defined]
    indices._sparseflash_others = others  # type: ignore[attr-defined]


def belong_together(indices: Tensor, others: tuple[Any, ...]) -> bool:
    """Whether a mask was made of these indices and exactly these other parts, so that its cache is valid for them."""
    known = getattr(indices, "_sparseflash_others", ())
    return len(known) == len(others) and all(
        a is b if isinstance(a, Tensor) else a == b for a, b in zip(known, others, strict=True)
    )


def mask_cache(indices: Tensor) -> MaskCache:
    """The cache of a mask: its transpose, its execution plans, its density."""
    cache: MaskCache | None = getattr(indices, "_sparseflash", None)
    if cache is None:
        if torch.compiler.is_compiling() or not getattr(indices, "_sparseflash_may_wait", False):
            return MaskCache(may_wait=False, recorded=False)
        cache = MaskCache(may_wait=True, recorded=False)
        indices._sparseflash = cache  # type: ignore[attr-defined]
    # While a CUDA graph is recorded, only dynamic masks made by the graph are planned; at other times only masks made
    # outside of graphs. See backends/triton/device.py for the reason.
    if cache.may_wait or cache.recorded == streams.is_capturing(indices.device):
        return cache
    return MaskCache(may_wait=False, recorded=False)


def is_countable(indices: Tensor) -> bool:
    """Whether the host may wait for the indices' values; not if torch.compile made them inside a graph."""
    return mask_cache(indices).may_wait


def once(cache: dict[Any, Any], key: Any, make: Callable[[], T]) -> T:
    """`cache[key]`, made on first use; safe on any CUDA stream, and made outside inference mode: otherwise a later
    training step could not use it.

    Values made under fake tensors, tracing or transforms hold tensors that belong to that run, without contents. They
    are returned, but not kept.
    """
    found = cache.get(key)
    if found is None:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                value = make()
        else:
            value = make()
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        if all(type(x) is Tensor and not wrapped(x) for x in streams.tensors_in(value)):
            cache[key] = value, ReadyEvent(value)
        return value
    cached: T = found[0]
    found[1].wait()
    return cached

"""Overrides the library's choice of kernels and work, to time alternatives and to test paths that otherwise need long
sequences.

Overrides take effect when kernels and work lists are prepared, not when a prepared call is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from sparseflash.backends.triton.configs import Config, Kernel
from sparseflash.backends.triton.schedule.splits import SPLITS, SplitRule
from sparseflash.backends.triton.schedule.tilings import PRODUCTS_FOR_TILINGS, Tiling
from sparseflash.blockmask.cache import clear_caches


class Overrides(NamedTuple):
    """With the defaults, the library makes every choice."""

    # Replace the configurations of the tables; they are only cut down to the tiles of the lists.
    configs: Mapping[Kernel, Config] = MappingProxyType({})
    # Chooses the tiling from candidates, the mask's own first; None: the cheapest.
    tiling: Callable[[Sequence[Tiling]], Tiling] | None = None
    products_for_tilings: int = PRODUCTS_FOR_TILINGS  # with fewer products, only the mask's own tiling is considered
    descriptors: bool = True  # use TMA descriptors if the tensors allow them
    pieces: bool = True  # allow fp32 to be split into pieces before it is multiplied
    splits: SplitRule = SPLITS


NEVER_SPLIT = SplitRule(fewest=1 << 40, fewest_tiles=1 << 40)


def always_split(tokens: int) -> SplitRule:
    """Cuts every list longer than `tokens` into chunks of at most that many tokens, but at least one tile."""
    return SplitRule(multiprocessors=1 << 40, heads=1, fewest=tokens, far=0.0, worth=1.0, worth_alike=1.0)


_current = Overrides()


def overrides() -> Overrides:
    """The current overrides, shared by all threads, because autograd runs backwards on other threads."""
    return _current


@contextmanager
def override(**choices: Any) -> Iterator[None]:
    """Sets fields of `Overrides` for all kernels and work prepared inside the block; nested blocks accumulate.

    >>> with override(descriptors=False), override(configs={"dq": Config(64, 64, 4, 2)}):
    ...     overrides().descriptors, overrides().configs
    (False, {'dq': Config(block_m=64, block_n=64, num_warps=4, num_stages=2, registers=0, q_in_registers=False)})
    >>> overrides() == Overrides()
    True

    The caches' keys do not include the overrides, so they are emptied on entry and exit. Passes and launches prepared
    inside stay usable. Raises ValueError for an unknown field.
    """
    global _current
    if unknown := choices.keys() - set(Overrides._fields):
        raise ValueError(f"choices must be of {', '.join(Overrides._fields)}; got {', '.join(sorted(unknown))}")
    before, changed = _current, _current._replace(**choices)
    clear_caches()
    _current = changed
    try:
        yield
    finally:
        _current = before
        clear_caches()

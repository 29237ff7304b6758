"""Choices made from outside, in place of the library's: to time them, and to test what only long problems reach.

They are looked up when kernels and work lists are prepared, not when a call is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from sparseflash.backends.triton.configs import PRODUCTS_FOR_TILINGS, SPLITS, Config, Kernel, SplitRule
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.blockmask.cache import clear_caches


class Overrides(NamedTuple):
    """The defaults leave everything to the library."""

    # In place of those of the tables, cut down to the tiles of the lists.
    configs: Mapping[Kernel, Config] = MappingProxyType({})
    # Which to walk, of those there are to choose from, the mask's own first; None: the cheapest.
    tiling: Callable[[Sequence[Tiling]], Tiling] | None = None
    products_for_tilings: int = PRODUCTS_FOR_TILINGS  # from how many on the cheapest is looked for
    descriptors: bool = True  # where the tensors allow them
    pieces: bool = True  # fp32 may be split into pieces before it is multiplied
    splits: SplitRule = SPLITS


NEVER_SPLIT = SplitRule(fewest=1 << 40, fewest_tiles=1 << 40)


def always_split(tokens: int) -> SplitRule:
    """Cuts every list longer than that into chunks of at most so many tokens, but at least one tile."""
    return SplitRule(multiprocessors=1 << 40, heads=1, fewest=tokens, far=0.0, worth=1.0, worth_alike=1.0)


_current = Overrides()


def overrides() -> Overrides:
    """Those that hold now, on all threads: gradients are computed on threads of PyTorch's."""
    return _current


@contextmanager
def override(**choices: Any) -> Iterator[None]:
    """What is prepared inside is prepared with these fields of `Overrides`; nested ones add up.

    >>> with override(descriptors=False), override(configs={"dq": Config(64, 64, 4, 2)}):
    ...     overrides().descriptors, overrides().configs
    (False, {'dq': Config(block_m=64, block_n=64, num_warps=4, num_stages=2, registers=0, q_in_registers=False)})
    >>> overrides() == Overrides()
    True

    The caches of the library, whose keys do not tell choices, are emptied before and afterwards; whoever holds a pass
    or a launch that was prepared inside can go on calling it. Raises ValueError where there is no such field.
    """
    global _current
    before, changed = _current, _current._replace(**choices)
    clear_caches()
    _current = changed
    try:
        yield
    finally:
        _current = before
        clear_caches()

"""Where everything derived from a mask's arrays is kept: with one of them, its indices.

The registered operator carries only tensors. Whoever holds the indices finds what was derived, in eager mode, in the
backward and under torch.compile, and it dies with the mask.

A tensor that a compiled graph makes inside keeps nothing: its memory, and with it the very same Python object, may
serve another of the graph's tensors a moment later, the indices of another mask among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparseflash.blockmask import streams
from sparseflash.blockmask.streams import ReadyEvent

T = TypeVar("T")


def keep_with(indices: Tensor, *, countable: bool, others: tuple[Any, ...]) -> None:
    """Prepares the indices of a mask that has just been made to keep what will be derived from them.

    `countable`: the host may wait for their numbers, once. It must not for dynamic masks, which are made at every step.
    `others`: what else that mask is made of.
    """
    if torch.compiler.is_compiling():
        # Said of what the compiled code gives back, if it is no dynamic mask: that may keep what is derived later on.
        indices._sparseflash_countable = countable  # type: ignore[attr-defined]
        return
    # What a CUDA graph makes is empty until it is replayed, and another thing after each replay.
    known = {"countable": countable, "recorded": streams.is_capturing(indices.device)}
    indices._sparseflash = known  # type: ignore[attr-defined]
    indices._sparseflash_others = others  # type: ignore[attr-defined]


def belong_together(indices: Tensor, others: tuple[Any, ...]) -> bool:
    """Whether a mask was made of these indices and just these others, so that what is derived is theirs, too."""
    known = getattr(indices, "_sparseflash_others", ())
    return len(known) == len(others) and all(
        a is b if isinstance(a, Tensor) else a == b for a, b in zip(known, others, strict=True)
    )


def mask_cache(indices: Tensor) -> dict[Any, Any]:
    """What has been derived from a mask's arrays so far: its transpose, its execution plans, its density."""
    kept: dict[Any, Any] | None = getattr(indices, "_sparseflash", None)
    if kept is None:
        if torch.compiler.is_compiling() or not getattr(indices, "_sparseflash_countable", False):
            return {}
        kept = {"countable": True, "recorded": False}
        indices._sparseflash = kept  # type: ignore[attr-defined]
    # While a CUDA graph is recorded, of dynamic masks those are planned that it makes, and at other times the others.
    # The rest is not planned while a graph is recorded: see backends/triton/cuda_graphs.py.
    if kept["countable"] or kept["recorded"] == streams.is_capturing(indices.device):
        return kept
    return {}


def is_countable(indices: Tensor) -> bool:
    """Whether the host may wait for their numbers. Not so of what torch.compile makes inside a graph."""
    return bool(mask_cache(indices).get("countable"))


def once(kept: dict[Any, Any], key: Any, make: Callable[[], T]) -> T:
    """`kept[key]`, made if it is not there; on whichever CUDA stream."""
    found = kept.get(key)
    if found is None:
        value = make()
        kept[key] = value, ReadyEvent(value)
        return value
    kept_value: T = found[0]
    found[1].wait()
    return kept_value

"""The class of each kind of score modification, and all modifications of a call in the form of kernel arguments.

A temperature divides the queries before any kernel runs, so it has no class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparseflash.backends.triton.changes import distance, key_bias, pair_bias, sink, softcap, table, tile_bias
from sparseflash.backends.triton.changes.distance import DistanceKind
from sparseflash.backends.triton.changes.hopper import HopperChanged, HopperKind
from sparseflash.backends.triton.changes.key_bias import KeyBiasKind
from sparseflash.backends.triton.changes.kind import WHOLE_NUMBERS, Changes, Kind, Part, Request
from sparseflash.backends.triton.changes.own import OwnKind
from sparseflash.backends.triton.changes.pair_bias import PairBiasKind
from sparseflash.backends.triton.changes.sink import SinkKind
from sparseflash.backends.triton.changes.softcap import SoftcapKind
from sparseflash.backends.triton.changes.table import TableKind
from sparseflash.backends.triton.changes.tile_bias import TileBiasKind
from sparseflash.backends.triton.launch.examples import like
from sparseflash.backends.triton.launch.gradient_sums import memory_argument
from sparseflash.scores.change import Scores

KINDS: dict[str, Any] = {
    "softcap": SoftcapKind, "distance": DistanceKind, "relative": TableKind, "key_bias": KeyBiasKind,
    "bias": PairBiasKind, "tile_bias": TileBiasKind, "function": OwnKind, "sink": SinkKind,
}  # fmt: skip


class Changed:
    """The score modifications of one layout, as the portable kernels take them."""

    def __init__(self, changes: Scores, request: Request, wanted: Sequence[bool] = ()) -> None:
        """wanted: which tensors need a gradient."""
        by_kind = changes.by_kind(wanted)
        self.all: list[Kind] = [
            KINDS[change.kind](change, request, by_kind[change.kind]) for change in changes.changes
        ]  # fmt: skip
        # A sink is not applied to scores; it is always the last.
        self.applied = [kind for kind in self.all if kind.applied]
        self.has_sink = len(self.applied) < len(self.all)
        # In full fp32 the kernels keep the maximum of unscaled scores, unless scores are modified. A sink is compared
        # with the maximum of scaled scores, so with a sink alone scores count as modified.
        self.are_changed = bool(self.applied) or request.dtype == torch.float32
        self.kinds = changes.kinds if self.are_changed else ()
        examples = [
            tuple(map(like, kind.tensors(change, request.device))) for kind, change in zip(self.all, changes.changes)
        ]
        self.sink = {"sink_ptr": examples.pop()[0]} if self.has_sink else {}
        self.examples = {"changes": tuple(examples)} if examples else {}
        whole = [number for kind in self.applied for number in kind.whole]
        self._whole = dict(zip(WHOLE_NUMBERS, whole))

    def constant(self, part: Part) -> Changes | None:
        """The compile-time argument CHANGES of a kernel; None if scores are only scaled and masked."""
        return Changes([kind.functions(part) for kind in self.applied]) if self.are_changed else None

    def numbers(self, part: Part) -> dict[str, Any]:
        """The numeric arguments of a kernel, which are the same at all calls."""
        if not self.applied:
            return {}
        of_rows = part == "rows"
        numbers = tuple(kind.numbers + (kind.numbers_of_rows if of_rows else ()) for kind in self.applied)
        return {"change_numbers": numbers, **self._whole}

    def learned(self, part: Part) -> dict[str, Any]:
        """The argument `learned` of a kernel, with examples of the memory for gradients."""
        if part == "forward":
            return {}
        rows = part == "rows"
        return memory_argument([kind.learned_rows if rows else kind.learned_columns for kind in self.applied])

    def tensors(self, changes: Scores, device: torch.device) -> dict[str, Any]:
        """The tensors of a call, by the names of the kernel arguments."""
        found = [kind.tensors(change, device) for kind, change in zip(self.all, changes.changes)]
        given: dict[str, Any] = {"sink_ptr": found.pop()[0]} if self.has_sink else {}
        if found:
            given["changes"] = tuple(found)
        return given


HOPPER_KINDS: dict[str, HopperKind] = {
    "softcap": softcap.HOPPER, "distance": distance.HOPPER, "relative": table.HOPPER, "key_bias": key_bias.HOPPER,
    "bias": pair_bias.HOPPER, "tile_bias": tile_bias.HOPPER, "sink": sink.HOPPER,
}  # fmt: skip


def changed_on_hopper(changes: Scores | None) -> HopperChanged:
    """The score modifications of a call as the Hopper forward takes them."""
    found = () if changes is None else changes.changes
    return HopperChanged(
        [distance.HOPPER_LOGARITHMIC if getattr(x, "is_log", False) else HOPPER_KINDS[x.kind] for x in found]
    )

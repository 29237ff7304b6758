"""The class of each kind of score modification, and all modifications of a call in the form of kernel arguments.

A temperature divides the queries before any kernel runs, so it has no class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparseflash.backends.triton.changes.distance import DistanceKind, DistanceOnHopper
from sparseflash.backends.triton.changes.hopper import HopperChanged, HopperKind, HopperRequest, Units
from sparseflash.backends.triton.changes.hopper_key_bias import KeyBiasOnHopper
from sparseflash.backends.triton.changes.hopper_pairs import PairsOnHopper, StoredPairsOnHopper
from sparseflash.backends.triton.changes.hopper_table import TableOnHopper
from sparseflash.backends.triton.changes.key_bias import KeyBiasKind
from sparseflash.backends.triton.changes.kind import WHOLE_NUMBERS, Changes, Kind, Part, Request
from sparseflash.backends.triton.changes.own import OwnKind
from sparseflash.backends.triton.changes.pair_bias import PairBiasKind
from sparseflash.backends.triton.changes.sink import SinkKind, SinkOnHopper
from sparseflash.backends.triton.changes.softcap import SoftcapKind, SoftcapOnHopper
from sparseflash.backends.triton.changes.table import TableKind
from sparseflash.backends.triton.changes.tile_bias import TileBiasKind
from sparseflash.backends.triton.device_functions.softmax import LOG2E
from sparseflash.backends.triton.hopper.configs import SMALLEST_SCALE
from sparseflash.backends.triton.launch.gradient_sums import memory_argument
from sparseflash.backends.triton.launch.launches import like
from sparseflash.scores.change import Scores

KINDS: dict[str, Any] = {
    "softcap": SoftcapKind, "distance": DistanceKind, "relative": TableKind, "key_bias": KeyBiasKind,
    "bias": PairBiasKind, "tile_bias": TileBiasKind, "function": OwnKind, "sink": SinkKind,
}  # fmt: skip


class Changed:
    """The score modifications of one layout, as the portable kernels take them."""

    def __init__(self, changes: Scores, request: Request, wanted: Sequence[bool] = ()) -> None:
        by_kind = changes.by_kind(wanted)
        self.all: list[Kind] = [
            KINDS[change.kind](change, request, by_kind[change.kind]) for change in changes.changes
        ]  # fmt: skip
        # A sink is not applied to scores; it is always the last.
        self.applied = [kind for kind in self.all if kind.applied]
        self.has_sink = len(self.applied) < len(self.all)
        # In full fp32 the kernels keep the maximum of unscaled scores, unless scores are modified. A sink is compared
        # with the maximum of scaled scores, so it counts as a modification there.
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
        return memory_argument([kind.learned.rows if rows else kind.learned.columns for kind in self.applied])

    def tensors(self, changes: Scores, device: torch.device) -> dict[str, Any]:
        found = [kind.tensors(change, device) for kind, change in zip(self.all, changes.changes)]
        given: dict[str, Any] = {"sink_ptr": found.pop()[0]} if self.has_sink else {}
        if found:
            given["changes"] = tuple(found)
        return given


HOPPER_KINDS: dict[str, type[HopperKind]] = {
    "softcap": SoftcapOnHopper, "distance": DistanceOnHopper, "relative": TableOnHopper, "key_bias": KeyBiasOnHopper,
    "bias": PairsOnHopper, "tile_bias": StoredPairsOnHopper, "sink": SinkOnHopper,
}  # fmt: skip
# Added terms are divided by the scale, and must stay finite. Products of fp16 numbers times this scale vanish.
_SMALLEST_SCALE_THAT_DIVIDES = 1e-20


def units_on_hopper(changes: Scores | None, scale: float, *, backward: bool) -> Units:
    """The units of scores in a Hopper kernel: those that a score modification asks for, or else 1 / scale."""
    given = () if changes is None else changes.changes
    kinds = [HOPPER_KINDS[change.kind] for change in given]
    if not backward and any(kind.maxima == "unscaled" for kind in kinds):
        return Units(LOG2E.value, 1.0, scale)  # scores keep their own units, in which no bias overflows
    own = [unit for kind, change in zip(kinds, given) if (unit := kind.unit(change)) is not None]
    divides = any(kind.is_added for kind in kinds)
    unit = own[0] if own else max(scale, _SMALLEST_SCALE_THAT_DIVIDES if divides else SMALLEST_SCALE)
    return Units(unit * LOG2E.value, 1.0 / unit, scale / unit)


def changed_on_hopper(
    changes: Scores | None, request: HopperRequest, wanted: Sequence[bool] = ()
) -> HopperChanged:  # fmt: skip
    """The score modifications of a call as a Hopper kernel takes them. wanted: which tensors need a gradient."""
    if changes is None:
        return HopperChanged(())
    by_kind = changes.by_kind(wanted)
    return HopperChanged(
        [HOPPER_KINDS[change.kind](change, request, by_kind[change.kind]) for change in changes.changes]
    )

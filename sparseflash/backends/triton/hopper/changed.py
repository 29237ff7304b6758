"""How score modifications reach the Hopper kernels: which kinds the kernels support, and their arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.device_functions.softmax import LOG2E
from sparseflash.backends.triton.hopper.change_flags import CAPPED, LOGARITHMIC
from sparseflash.backends.triton.hopper.configs import SMALLEST_SCALE
from sparseflash.backends.triton.launch.examples import like
from sparseflash.scores.change import PAIRS, Scores

# At most one of each, in the order that `Scores` keeps.
_DIVIDED = ("distance", "relative", "key_bias", *PAIRS)  # added to scores, and so divided by their unit
KINDS = ("softcap", *_DIVIDED, "sink")
LEARNED = (*_DIVIDED, "sink")  # kinds whose tensors may have gradients
# Added terms are divided by the scale, and must stay finite. Products of fp16 numbers times this scale vanish.
_SMALLEST_SCALE_THAT_DIVIDES = 1e-20
# A smaller cap leaves nothing of a score, and a larger one does not change it; within these all results are finite.
_CAPS = 1e-12, 1e30


def flags_of(changes: Scores | None) -> int:
    """The CHANGES of the backward kernel."""
    if changes is None:
        return 0
    decay = changes.find("distance")
    flags = 0 if changes.find("softcap") is None else CAPPED.value
    return flags | (LOGARITHMIC.value if decay is not None and decay.is_log else 0)


def numbers_of(changes: Scores | None, scale: float) -> dict[str, float]:
    """The kernels' scalars, in the units of `hopper/scores.py`: the cap, or 1 / scale."""
    cap = None if changes is None else changes.find("softcap")
    divides = changes is not None and not set(_DIVIDED).isdisjoint(changes.kinds)
    if cap is None:
        unit = max(scale, _SMALLEST_SCALE_THAT_DIVIDES if divides else SMALLEST_SCALE)
    else:
        unit = min(max(cap.cap, _CAPS[0]), _CAPS[1])
    return {"qk_scale": unit * LOG2E.value, "inverse_unit": 1.0 / unit, "cap_scale": scale / unit}


def forward_numbers_of(changes: Scores | None, scale: float) -> dict[str, float]:
    """`numbers_of`, for the forward. With a bias of pairs scores keep their own units, in which no bias overflows."""
    if changes is None or set(PAIRS).isdisjoint(changes.kinds):
        return numbers_of(changes, scale)
    return {"qk_scale": LOG2E.value, "inverse_unit": 1.0, "cap_scale": scale}


def tensors_of(changes: Scores | None, q: Tensor) -> dict[str, Any]:
    """The kernels' tensors, except tables and biases: see `tables`, `biases` and `pairs`."""
    if changes is None:
        return {}
    found = {"slopes_ptr": changes.find("distance"), "sink_ptr": changes.find("sink")}
    return {name: aligned_start(x.tensors()[0].contiguous()) for name, x in found.items() if x is not None}


def examples_of(changes: Scores | None, q: Tensor) -> dict[str, Any]:
    """`tensors_of`, on the meta device."""
    return {name: like(x) for name, x in tensors_of(changes, q).items()}

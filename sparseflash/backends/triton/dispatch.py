"""Chooses the kernels of a pass: the family that the caller requests, or the first one that can serve the pass and is
not slower there. Warns where a faster one had to be refused.

A new family is a folder and a line of `FAMILIES`.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparseflash.backends.triton import gate
from sparseflash.backends.triton.family import Family, Request
from sparseflash.backends.triton.hopper import support
from sparseflash.blockmask.cache import BoundedDict
from sparseflash.performance import PerformanceWarning


def _hopper_passes() -> Any:
    from sparseflash.backends.triton.hopper.passes import backward, forward

    return forward, backward


def _portable_passes() -> Any:
    from sparseflash.backends.triton.portable.backward_pass import backward
    from sparseflash.backends.triton.portable.forward_pass import forward

    return forward, backward


# The last one serves every call that the checks let pass.
FAMILIES = (
    Family(
        "hopper", _hopper_passes, support.refuses, support.yields, gate.refuses, note=gate.note, has_short_tiles=False
    ),
    Family("portable", _portable_passes),
)  # fmt: skip


class Decision(NamedTuple):
    """The family that serves a pass, or None, and the reason why each family that was tried before it does not."""

    family: Family | None
    refusals: dict[str, str]

    def serving(self) -> Family:
        """Raises ValueError without a family."""
        if self.family is None:
            ((wanted, reason),) = self.refusals.items()
            raise ValueError(f"the {wanted} kernels cannot serve this call: {reason}.")
        return self.family


def decide(request: Request, wanted: str = "") -> Decision:
    """The family that serves a request. `wanted`: the name of the only family allowed, or "" for any.

    Raises ValueError for an unknown name.
    """
    refusals: dict[str, str] = {}
    for family in FAMILIES:
        if wanted not in ("", family.name):
            continue
        # `untested` may have to run a check, so it is called last, only for a family that would serve.
        reason = family.refuses(request) or (None if wanted else family.yields(request)) or family.untested(request)
        if reason is None:
            return Decision(family, refusals)
        refusals[family.name] = reason
    if wanted not in [family.name for family in FAMILIES]:
        raise ValueError(f"kernels must be of {', '.join(family.name for family in FAMILIES)}; got {wanted!r}.")
    return Decision(None, refusals)


def has_short_tiles(wanted: str) -> bool:
    """Whether the family that a caller requests, or "" for any, takes tiles of fewer than 128 tokens without a mask."""
    return all(family.has_short_tiles for family in FAMILIES if family.name == wanted)


# With fewer queries, the host's work per call takes at least as long as the kernels.
_FEWEST_QUERIES = 1024
_PACKAGES = tuple(f"{Path(module.__file__ or '').parent}{os.sep}" for module in (sys.modules["sparseflash"], torch))
_said = BoundedDict(64)  # the kinds of reasons; `clear_caches` empties it
_lock = threading.Lock()


def warn_if_slower(request: Request, decision: Decision) -> None:
    """Warns if a GPU of compute capability 9.0 runs the portable kernels where the Hopper kernels would be faster.

    A refused backward alone gives no warning, unless the version of Triton is the reason; `explain` reports it.
    """
    if "hopper" not in decision.refusals or decision.family is None or decision.family.name == "hopper":
        return  # also if the caller asked for the portable kernels
    if not request.architecture.has_wgmma or support.is_interpreted() or gate.gpu_of(request) is None:
        return
    if request.dtype == torch.float32 or support.yields(request) is not None:
        return
    why = decision.refusals["hopper"]
    if support.refuses(request) is None:
        lost = f"Long sequences may take up to twice as long; to get those kernels back, {gate.remedy(request)}"
        _warn("the version of Triton", "on this GPU", why, lost)
    elif not request.backward and request.tokens[0] >= _FEWEST_QUERIES:
        _warn(why.partition("; got ")[0], "for this call", why, "It may take up to twice as long")


def _warn(kind: str, where: str, why: str, lost: str) -> None:
    with _lock:
        if _said.get(kind):
            return
        _said.put(kind, True)
    # pyproject.toml makes the tests ignore messages that begin like this one.
    message = (
        f"sparseflash runs its portable kernels {where} and not its faster ones for Hopper: {why}. {lost}. Results are "
        "as exact. `sparseflash.explain` has the full answer for a call; warnings.filterwarnings('ignore', "
        "category=sparseflash.PerformanceWarning) silences this."
    )
    warnings.warn(message, PerformanceWarning, stacklevel=_level())


def _level() -> int:
    """The stack level of the code that called sparseflash, counted from `_warn`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame, level = frame.f_back, level + 1
    return level

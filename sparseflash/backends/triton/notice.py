"""Warns that a call runs slower on this GPU than documented, once per process for each kind of reason."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from pathlib import Path

import torch

from sparseflash.backends.triton import gate
from sparseflash.backends.triton.dispatch import Decision
from sparseflash.backends.triton.family import Request
from sparseflash.backends.triton.hopper import support
from sparseflash.blockmask.cache import BoundedDict
from sparseflash.performance import PerformanceWarning

# With fewer queries, the host's work per call takes at least as long as the kernels.
_FEWEST_QUERIES = 1024
_PACKAGES = tuple(f"{Path(module.__file__ or '').parent}{os.sep}" for module in (sys.modules["sparseflash"], torch))
_said = BoundedDict(64)
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
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame, level = frame.f_back, level + 1
    return level

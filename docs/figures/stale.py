"""Which runs are older than the last change of the kernels that they are about, by git's history."""

from __future__ import annotations

import re
import subprocess
from functools import cache

from docs.figures.store import ROOT, Stored

_TRITON = "sparseflash/backends/triton"
_KERNELS = (f"{_TRITON}/portable", f"{_TRITON}/hopper", f"{_TRITON}/persistent")
_LAUNCH = (f"{_TRITON}/launcher.py", f"{_TRITON}/dispatch.py", f"{_TRITON}/api.py")
# By benchmark, or by file: the paths whose change makes its figures old.
KERNELS_OF: dict[str, tuple[str, ...]] = {
    "speed": _KERNELS,
    "triton-versions": _KERNELS,
    "layer": _KERNELS,
    "io": _KERNELS,
    "lm-speed": (*_KERNELS, "experiments/lm/model"),
    "gpt": (*_KERNELS, "experiments/lm/model"),
    "huggingface": (*_KERNELS, "sparseflash/huggingface"),
    "scores": (*_KERNELS, "sparseflash/scores"),
    "selection": (*_KERNELS, "masks/fused"),
    "calls": (*_LAUNCH, "sparseflash/attention.py", "sparseflash/backends/operators.py"),
    "decode": (f"{_TRITON}/decode", "sparseflash/decode.py"),
    "generate": (f"{_TRITON}/decode", "sparseflash/huggingface"),
    "distributed": (*_KERNELS, "sparseflash/distributed"),
    "exactness": _KERNELS,
    "compile": _KERNELS,
    "tune": _KERNELS,
    "masks": (
        *(f"masks/tiling/{name}.py" for name in ("band", "spans", "ranges", "kinds", "diagonals", "listing")),
        *(f"sparseflash/blockmask/{name}.py" for name in ("build", "bitmask", "unique", "ops/place")),
    ),
    "lra/h200": (*_KERNELS, "experiments/lra/model"),
}
# What models learned, and how random calls ended: records that no later change makes wrong.
RECORDS = {"lm", "lra", "pathx", "recall", "fuzz"}


def kernels_of(file: Stored) -> tuple[str, ...]:
    """The paths that a run is about; none if it is a record."""
    return KERNELS_OF.get(file.key) or KERNELS_OF.get(file.key.partition("/")[0], ())


@cache
def changes_since(commit: str, paths: tuple[str, ...]) -> int | None:
    """How many commits changed `paths` after `commit`; None where git's history cannot say."""
    found = re.match(r"[0-9a-f]{7,40}", commit)
    if not found or not paths:
        return None
    asked = ["git", "-C", str(ROOT), "rev-list", "--count", f"{found[0]}..HEAD", "--", *paths]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, no repository, or a commit that a shallow clone lacks
        return None
    return int(answer.stdout)


def changes(file: Stored) -> int | None:
    """How many commits have changed the kernels of a run since; None where that is not known."""
    return changes_since(file.run.commit, kernels_of(file))

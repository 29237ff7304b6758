"""Chooses the kernels of a pass: the family that the caller requests, or the first one that can serve the pass and is
not slower there.

A new family is a folder and a line of `FAMILIES`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sparseflash.backends.triton import gate
from sparseflash.backends.triton.family import Family, Request
from sparseflash.backends.triton.hopper import support


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

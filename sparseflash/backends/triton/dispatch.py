"""Chooses the kernels of a pass: the first family that can serve it and is not slower there, or the one asked for.

A family is a folder of kernels with a forward pass and a backward pass. Three functions of a family give the reason why
it cannot serve a request, why another family is faster, and why it must not run under the installed Triton. To add a
family, write its folder and list it in `FAMILIES`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sparseflash.backends.triton.family import Family, Request


def _portable_passes() -> Any:
    from sparseflash.backends.triton.portable.backward_pass import backward
    from sparseflash.backends.triton.portable.forward_pass import forward

    return forward, backward


def _never(request: Request) -> str | None:
    return None  # what no kernel can do has been refused already


def _hopper_passes() -> Any:
    from sparseflash.backends.triton.hopper.passes import backward, forward

    return forward, backward


def _hopper_refuses(request: Request) -> str | None:
    from sparseflash.backends.triton.hopper.support import refuses

    return refuses(request)


def _hopper_yields(request: Request) -> str | None:
    from sparseflash.backends.triton.hopper.support import yields

    return yields(request)


def _hopper_untested(request: Request) -> str | None:
    from sparseflash.backends.triton.gate import refuses

    return refuses(request)


FAMILIES = (
    Family("hopper", _hopper_refuses, _hopper_yields, _hopper_untested, _hopper_passes),
    Family("portable", _never, _never, _never, _portable_passes),
)


class Decision(NamedTuple):
    """The family that serves a pass, and why each family before it does not; or why the only one allowed does not."""

    family: Family | None
    refusals: dict[str, str]

    def serving(self) -> Family:
        """The family; raises ValueError if there is none."""
        if self.family is None:
            ((wanted, reason),) = self.refusals.items()
            raise ValueError(f"the {wanted} kernels cannot serve this call: {reason}.")
        return self.family


def decide(request: Request, wanted: str = "") -> Decision:
    """The family that serves a request. `wanted`: the name of the only family allowed, or "".

    Raises ValueError if that family is unknown.
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

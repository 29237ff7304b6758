"""Which kernels run: those of the first family that can do what a call asks, or of the one that is asked for.

A family is a folder of kernels with two classes, a forward and a backward, and a function that says why it cannot serve
a request. To add one: write its folder, and list it here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sparseflash.backends.triton.family import Family, Request


def _portable_passes() -> Any:
    from sparseflash.backends.triton.portable.passes import backward, forward

    return forward, backward


def _portable_refuses(request: Request) -> str | None:
    return None  # what no kernel can do has been refused before


FAMILIES = (Family("portable", _portable_refuses, _portable_passes),)  # the fastest first


class Decision(NamedTuple):
    """The family that serves a request, and why those before it do not."""

    family: Family
    refusals: dict[str, str]


def decide(request: Request, wanted: str = "") -> Decision:
    """The family to serve a request; `wanted`: the name of the only one that may.

    Raises ValueError if that one is not known or cannot.
    """
    refusals: dict[str, str] = {}
    for family in FAMILIES:
        if wanted not in ("", family.name):
            continue
        reason = family.refuses(request)
        if reason is None:
            return Decision(family, refusals)
        refusals[family.name] = reason
    if wanted not in [family.name for family in FAMILIES]:
        raise ValueError(f"kernels must be of {', '.join(family.name for family in FAMILIES)}; got {wanted!r}.")
    raise ValueError(f"the {wanted} kernels cannot serve this call: {refusals[wanted]}.")

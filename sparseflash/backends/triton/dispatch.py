"""Chooses the kernels of a call: the first family that can serve it, or the one that was asked for.

A family is a folder of kernels with a forward pass and a backward pass, and a function that says why it cannot serve a
request. To add one, write its folder and list it in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sparseflash.backends.triton.launcher import BoundLaunch
from sparseflash.backends.triton.schedule.plan import Plan


class Setting(NamedTuple):
    """What determines the kernels of a problem besides the layout of its tensors."""

    plan: Plan
    capability: tuple[int, int]
    block: tuple[int, int]
    tf32: bool
    lengths: bool
    dropout: bool


class Request(NamedTuple):
    """The properties of a call that decide which kernels can serve it."""

    capability: tuple[int, int]
    dtype: torch.dtype
    dims: tuple[int, int]  # D and Dv
    block: tuple[int, int]
    lengths: bool
    dropout: bool
    dynamic: bool  # made on the device, and perhaps used only once

    @classmethod
    def of(cls, setting: Setting, q: Tensor, v: Tensor) -> Request:
        """The request of a problem with this setting."""
        return cls(
            setting.capability, q.dtype, (q.shape[-1], v.shape[-1]), setting.block, setting.lengths, setting.dropout,
            not setting.plan.lists.lasting,
        )  # fmt: skip


class KernelChoice(NamedTuple):
    """How one kernel of a pass runs, and why so; `explain` shows it."""

    kernel: str
    block_m: int  # queries and keys of the tile of one step
    block_n: int
    num_warps: int
    num_stages: int
    arithmetic: str
    loads: str  # how tiles get into shared memory or registers, and why so
    walks: str  # whose tiles the lists have, and why so
    programs: int
    tiles: int  # of the lists that all programs walk
    longest: int  # tiles of the program that walks most
    chunks: int  # programs that share a list with others, and whose partial results another kernel merges


class ForwardPass(Protocol):
    """A forward prepared for tensors of one layout."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, seed: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`(out, lse, kept)`; `kept` is what the backward of the same family needs besides them."""

    def launches(self) -> list[BoundLaunch]:
        """All kernel launches of a call."""

    def choices(self) -> list[KernelChoice]:
        """How its kernels run, but for those that only prepare or merge."""


class BackwardPass(Protocol):
    """A backward prepared for tensors of one layout."""

    def __call__(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        kept: Tensor | None, lengths: Tensor | None, seed: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`(dq, dk, dv)`."""

    def launches(self) -> list[BoundLaunch]:
        """All kernel launches of a call."""

    def choices(self) -> list[KernelChoice]:
        """How its kernels run, but for those that only prepare or merge."""


class Family(NamedTuple):
    """A set of kernels that belong together. `portable/passes.py` shows the signatures of the functions in `passes`."""

    name: str
    refuses: Callable[[Request], str | None]  # why it cannot serve a request, or None
    passes: Callable[[], tuple[Callable[..., ForwardPass], Callable[..., BackwardPass]]]  # imports what prepares them


def _portable_passes() -> Any:
    from sparseflash.backends.triton.portable.passes import backward, forward

    return forward, backward


def _portable_refuses(request: Request) -> str | None:
    return None  # what no kernel can do has been refused already


FAMILIES = (Family("portable", _portable_refuses, _portable_passes),)  # fastest first


class Decision(NamedTuple):
    """The family that serves a request, and why each family before it does not."""

    family: Family
    refusals: dict[str, str]


def decide(request: Request, wanted: str = "") -> Decision:
    """The family that serves a request. `wanted`: the name of the only family allowed, or "".

    Raises ValueError if that family is unknown or cannot serve the request.
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

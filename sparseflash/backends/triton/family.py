"""The interface of a family of kernels: what a call asks of it, and what it provides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sparseflash.backends.saved import Saved
from sparseflash.backends.triton.alignment import can_describe
from sparseflash.backends.triton.launcher import BoundLaunch
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.dropout import Dropout
from sparseflash.scores.change import Scores


class Setting(NamedTuple):
    """What determines the kernels of a problem besides the layout of its tensors."""

    plan: Plan
    capability: tuple[int, int]
    block: tuple[int, int]
    tf32: bool
    lengths: bool
    dropout: bool
    coordinates: tuple[str, ...]  # those that the dropout is told of: see `Dropout`


class PairBias(NamedTuple):
    """What decides which kernels can serve a bias of pairs of queries and keys."""

    dtype: torch.dtype
    has_rows: bool  # each pair, or each of live tiles, has a number, and rows begin at multiples of 16 bytes
    is_shared: bool  # by batch elements or heads


class Request(NamedTuple):
    """The properties of a call that decide which kernels can serve it."""

    capability: tuple[int, int]
    dtype: torch.dtype
    dims: tuple[int, int]  # D and Dv
    block: tuple[int, int]
    lengths: bool
    dropout: bool
    dynamic: bool  # made on the device, and perhaps used only once
    tokens: tuple[int, int]  # queries and keys of a head
    keys: float  # in the live tiles of a query, mean
    backward: bool
    changes: tuple[str, ...] = ()  # the kinds of changes of scores
    learned: tuple[str, ...] = ()  # those whose tensors get a gradient in this pass
    logarithmic: bool = False  # scores decay with the logarithm of the distance
    patterns: int = 1  # of the mask
    # Of a table of relative positions: how many entries it has for all query heads that share keys, and whether these
    # follow from the distance, most neighbouring distances having the same.
    entries: int = 0
    in_runs: bool = True
    pairs: PairBias | None = None
    device: torch.device | None = None  # of the tensors
    heads: int = 1  # query heads of all batch elements

    @classmethod
    def of(
        cls, setting: Setting, q: Tensor, v: Tensor, changes: Scores | None = None, wanted: Sequence[bool] = (), *,
        backward: bool,
    ) -> Request:  # fmt: skip
        """One pass of a problem with this setting. wanted: which tensors of the changes get a gradient."""
        plan, (block_q, block_k) = setting.plan, setting.block
        tokens = plan.lists.tokens
        return cls(
            setting.capability, q.dtype, (q.shape[-1], v.shape[-1]), setting.block, setting.lengths, setting.dropout,
            not plan.lists.reusable, tokens, plan.tiles_per_head * block_k / -(-tokens[0] // block_q), backward,
            *_described(changes, wanted), plan.lists.patterns,
            *_table(changes, q.shape[1] // v.shape[1]), _pair_bias(changes, q, tokens), q.device,
            q.shape[0] * q.shape[1],
        )  # fmt: skip


def _described(changes: Scores | None, wanted: Sequence[bool]) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """The fields of a request about its changes of scores."""
    if changes is None:
        return (), (), False
    decay = changes.find("distance")
    learned = tuple(kind for kind, each in changes.by_kind(wanted).items() if any(each))
    return changes.kinds, learned, decay is not None and decay.is_log


def _table(changes: Scores | None, group: int) -> tuple[int, bool]:
    """The fields of a request about the table among its changes of scores."""
    table = None if changes is None else changes.find("relative")
    return (0, True) if table is None else (group * table.table.shape[1], table.until.numel() > 0)


def _pair_bias(changes: Scores | None, q: Tensor, tokens: tuple[int, int]) -> PairBias | None:
    """The field of a request about its bias of pairs."""
    if changes is None:
        return None
    if (bias := changes.find("bias")) is not None:
        values = bias.values
        has_rows = tuple(values.shape[2:]) == tokens and values.stride(3) == 1 and can_describe(values)
    elif (bias := changes.find("tile_bias")) is not None:
        values, has_rows = bias.values, True
    else:
        return None
    return PairBias(values.dtype, has_rows, values.shape[:2] != q.shape[:2])


class KernelChoice(NamedTuple):
    """How one kernel of a pass runs, and why; `explain` shows it."""

    kernel: str
    block_m: int  # queries and keys of the tile of one step
    block_n: int
    num_warps: int
    num_stages: int  # compilation may lower it: see `Variant.compiled`
    arithmetic: str
    loads: str  # how tiles get into shared memory or registers, and why
    walks: str  # the tiles of the lists, and why
    programs: int
    tiles: int  # of the lists of all programs
    longest: int  # tiles of the program that has most
    chunks: int  # programs with part of a list, whose partial results another kernel merges


class ForwardPass(Protocol):
    """A forward prepared for tensors of one layout."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`(out, lse, kept)`; `kept` is what the backward of the same family needs besides them.

        A family that does not refuse changes of scores takes them as one more argument, `changes`.
        """

    def launches(self) -> list[BoundLaunch]:
        """All kernel launches of a call."""

    def choices(self) -> list[KernelChoice]:
        """How its kernels run, except for those that only prepare or merge."""


class BackwardPass(Protocol):
    """A backward prepared for tensors of one layout."""

    def __call__(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, lengths: Tensor | None, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`(dq, dk, dv)`.

        A family that does not refuse changes of scores also has `with_learned`, which takes them as one more argument
        and returns the gradients of their tensors beside these.
        """

    def launches(self) -> list[BoundLaunch]:
        """All kernel launches of a call."""

    def choices(self) -> list[KernelChoice]:
        """How its kernels run, except for those that only prepare or merge."""


class Family(NamedTuple):
    """A set of kernels that belong together. `forward_pass.py` and `backward_pass.py` in `portable/` show `passes`."""

    name: str
    refuses: Callable[[Request], str | None]  # why it cannot serve a request, or None
    # Why another family is to run, or None. Of a forward it must not depend on how many sequences and heads there are:
    # a row has the same bits whatever else is in its batch.
    yields: Callable[[Request], str | None]
    # Why the kernels must not run under the installed Triton, or None. Called only for a request that they would serve.
    untested: Callable[[Request], str | None]
    passes: Callable[[], tuple[Callable[..., ForwardPass], Callable[..., BackwardPass]]]  # imports what prepares them

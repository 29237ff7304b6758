"""The interface of a family of kernels: the request that describes a call, and the passes that serve it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sparseflash.backends.saved import Saved
from sparseflash.backends.triton.alignment import can_describe
from sparseflash.backends.triton.architecture import Architecture, architecture_of
from sparseflash.backends.triton.launcher import BoundLaunch
from sparseflash.backends.triton.schedule.fused import Listed
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.blockmask import BlockMask
from sparseflash.dropout import Dropout
from sparseflash.scores.change import Scores


class Setting(NamedTuple):
    """Everything that determines the kernels of a problem, except the layout of its tensors."""

    plan: Plan
    capability: tuple[int, int]
    block: tuple[int, int]
    tf32: bool
    lengths: bool
    dropout: bool
    coordinates: tuple[str, ...]  # the coordinate tensors that the dropout has: see `Dropout`

    @property
    def architecture(self) -> Architecture:
        return architecture_of(self.capability)


class PairBias(NamedTuple):
    """The properties of a bias for pairs (query, key) that decide which kernels can serve it."""

    dtype: torch.dtype
    has_rows: bool  # neither queries nor keys are broadcast, and rows begin at multiples of 16 bytes
    is_shared: bool  # batch elements or heads share it


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
    keys: float  # mean number of keys in the live tiles of a query
    backward: bool
    changes: tuple[str, ...] = ()  # the kinds of the score modifications
    learned: tuple[str, ...] = ()  # the kinds whose tensors need a gradient in this pass
    logarithmic: bool = False  # scores decay with the logarithm of the distance
    patterns: int = 1  # of the mask
    # For a relative position table: the number of entries for all query heads that share a key head, and whether the
    # entry depends on the distance alone, with the same entry for runs of neighbouring distances.
    entries: int = 0
    in_runs: bool = True
    pairs: PairBias | None = None
    device: torch.device | None = None  # of the tensors
    heads: int = 1  # query heads of all batch elements
    # For a Hopper backward with blocks of 32 or 64: the share of the live 128 x 128 tiles that the live blocks fill.
    # Otherwise 0, also with blocks of 16, which have not been measured.
    filled: float = 0.0

    @property
    def architecture(self) -> Architecture:
        return architecture_of(self.capability)

    @classmethod
    def of(
        cls, setting: Setting, q: Tensor, v: Tensor, changes: Scores | None = None, wanted: Sequence[bool] = (), *,
        backward: bool,
    ) -> Request:  # fmt: skip
        plan, (block_q, block_k) = setting.plan, setting.block
        tokens, filled = plan.lists.tokens, 0.0
        if backward and 32 <= min(block_q, block_k) < 128 and architecture_of(setting.capability).has_wgmma:
            filled = plan.filled(setting.block, (128, 128))
        return cls(
            setting.capability, q.dtype, (q.shape[-1], v.shape[-1]), setting.block, setting.lengths, setting.dropout,
            not plan.lists.reusable, tokens, plan.tiles_per_head * block_k / -(-tokens[0] // block_q), backward,
            *_described(changes, wanted), plan.lists.patterns,
            *_table(changes, q.shape[1] // v.shape[1]), _pair_bias(changes, q, tokens), q.device,
            q.shape[0] * q.shape[1], filled,
        )  # fmt: skip


def _described(changes: Scores | None, wanted: Sequence[bool]) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    if changes is None:
        return (), (), False
    decay = changes.find("distance")
    learned = tuple(kind for kind, each in changes.by_kind(wanted).items() if any(each))
    return changes.kinds, learned, decay is not None and decay.is_log


def _table(changes: Scores | None, group: int) -> tuple[int, bool]:
    table = None if changes is None else changes.find("relative")
    return (0, True) if table is None else (group * table.table.shape[1], table.until.numel() > 0)


def _pair_bias(changes: Scores | None, q: Tensor, tokens: tuple[int, int]) -> PairBias | None:
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
    block_m: int  # queries of one step's tile; block_n: keys
    block_n: int
    num_warps: int
    num_stages: int  # compilation may lower it: see `Variant.compiled`
    arithmetic: str
    loads: str  # how tiles are loaded, and why
    walks: str  # the tiles of the lists, and why
    programs: int
    tiles: int  # in the lists of all programs
    longest: int  # the most tiles of one program
    chunks: int  # programs with only a part of a list; another kernel merges their partial results


class Pass(Protocol):
    """A pass prepared for tensors of one layout."""

    def launches(self) -> list[BoundLaunch]:
        """All kernel launches of a call."""

    def choices(self) -> list[KernelChoice]:
        """How the kernels run, except for kernels that only prepare or merge."""


class Rows(NamedTuple):
    """The results of a `DynamicForward` that the backward reuses: the lists over rows and, after a portable forward,
    the work of its kernel, in tiles of `tile` queries.
    """

    lists: Listed
    work: Tensor | None = None
    tile: int = 0


class DynamicForward(Protocol):
    """The forward for dynamic masks that are used once, with tensors and masks of one layout."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor, Rows]:
        """`(out, lse, rows)`."""


class DynamicBackward(Protocol):
    """The backward after a `DynamicForward` of any family."""

    def __call__(self, dout: Tensor, saved: Saved, mask: BlockMask, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """`(dq, dk, dv)`."""


class ForwardPass(Pass, Protocol):
    """A forward pass."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, dropout: Dropout | None, changes: Scores | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`kept` holds anything else that the backward of the same family needs."""

    def dynamic(self) -> DynamicForward | None:
        """For a dynamic mask: the forward for other masks of its layout; None if each mask needs a plan."""


class BackwardPass(Pass, Protocol):
    """A backward pass."""

    def __call__(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, lengths: Tensor | None, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A family that serves score modifications also has `with_learned`. It takes them as one more argument, and
        also returns the gradients of their tensors.
        """

    def dynamic(self) -> DynamicBackward | None:
        """For a dynamic mask: the backward for other masks of its layout; None if each mask needs a plan."""


def _none(request: Request) -> str | None:
    return None


class Family(NamedTuple):
    """The functions of a request return a text, or None, which is their default."""

    name: str
    # Imports and returns the functions that prepare a forward and a backward.
    passes: Callable[[], tuple[Callable[..., ForwardPass], Callable[..., BackwardPass]]]
    refuses: Callable[[Request], str | None] = _none  # why it cannot serve a request
    # Why another family should run. For a forward this must not depend on the number of sequences and heads, as a row
    # must have the same bits in every batch.
    yields: Callable[[Request], str | None] = _none
    # Why the kernels must not run under the installed Triton. Called only for a request that they would serve.
    untested: Callable[[Request], str | None] = _none
    note: Callable[[Request], str | None] = _none  # what `explain` says of a request that they serve
    has_short_tiles: bool = True  # without a mask, tiles may have fewer than 128 tokens

"""The interface of a transport, which carries rows from rank to rank in an exchange."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch.distributed as dist
from torch import Tensor

from sparseflash.distributed.rows import Rows
from sparseflash.distributed.shards import Integers

Wait = Callable[[], None]
_ALIGNMENT = 128  # bytes: a multiple of every dtype's size, as views of the buffer need, and good for copies


@dataclass(frozen=True)
class Message:
    """`taken`: the rows of a tensor that are sent, for rank 0 first; None if the tensor has just these; `outgoing`,
    `incoming`: rows for and from each rank; `between`: int64 `[from, to]`, the rows of all ranks, counted when called.
    """

    taken: Rows | None
    outgoing: list[int]
    incoming: list[int]
    between: Callable[[], Integers]


class Transport(Protocol):
    """`overlaps`: whether attention runs at full speed meanwhile."""

    overlaps: bool

    def begin(self, room: Callable[[], int]) -> None:
        """Makes room for several exchanges at once (`room_of`), so that none waits until others have been read."""

    def start(self, tensors: Sequence[Tensor], message: Message) -> tuple[list[Tensor], Wait]:
        """Starts sending rows of tensors `[rows, D]`: `(rows to be received, a wait, for each)`.

        The tensors may be freed, but must not be changed, before the wait. Received rows may be read on the stream that
        has waited.
        """


def room_of(between: Integers, row_bytes: Sequence[int]) -> int:
    """The bytes that an exchange of tensors with rows of these sizes takes in every rank's buffer, either way."""
    return places_of(between, row_bytes)[-1]


def places_of(between: Integers, row_bytes: Sequence[int]) -> list[int]:
    """Where each tensor's rows begin in a buffer, and where the last end: the same on all ranks, either way."""
    most = int(max(between.sum(1).max(), between.sum(0).max()))
    sizes = [-(-most * each // _ALIGNMENT) * _ALIGNMENT for each in row_bytes]
    return [0, *np.cumsum(sizes).tolist()]


def alive(group: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """The group of a transport, which holds it weakly; RuntimeError if it has been destroyed."""
    found = group()
    if found is None:
        raise RuntimeError("the process group of a plan must exist as long as the plan is used; it has been destroyed.")
    return found

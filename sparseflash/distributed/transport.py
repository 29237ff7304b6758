"""What carries rows from rank to rank in an exchange: what is told to it, and what it must do.

`collectives` and `peer_copies` are the two ways; `transport_choice` says which one a group takes.
"""

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
    """The rows that go between ranks in one exchange.

    `taken`: which rows of a tensor are sent, those for rank 0 first; None if the tensor has just these; `outgoing`,
    `incoming`: rows for and from each rank; `between`: int64 `[from, to]`, those of all ranks, counted when called.
    """

    taken: Rows | None
    outgoing: list[int]
    incoming: list[int]
    between: Callable[[], Integers]


class Transport(Protocol):
    """One way to send rows between the ranks of a group, which all make the same calls in the same order.

    `overlaps`: whether attention goes on at full speed meanwhile.
    """

    overlaps: bool

    def begin(self, room: Callable[[], int]) -> None:
        """Makes room for several exchanges at once (`room_of`), so that none waits until others have been read."""

    def start(self, tensors: Sequence[Tensor], message: Message) -> tuple[list[Tensor], Wait]:
        """Starts sending rows of tensors `[rows, D]`: `(rows that will come of each, what waits for them)`.

        The tensors may be freed, but must not be changed, before the wait. What comes may be read on the stream that
        has waited.
        """


def room_of(between: Integers, row_bytes: Sequence[int]) -> int:
    """The bytes that an exchange of tensors with rows of so many bytes takes in every rank's buffer, either way."""
    return places_of(between, row_bytes)[-1]


def places_of(between: Integers, row_bytes: Sequence[int]) -> list[int]:
    """Where each tensor's rows begin in a buffer, and where the last end: the same for what goes back, and on all
    ranks.
    """
    most = int(max(between.sum(1).max(), between.sum(0).max()))
    sizes = [-(-most * each // _ALIGNMENT) * _ALIGNMENT for each in row_bytes]
    return [0, *np.cumsum(sizes).tolist()]


def alive(group: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """The group of a transport, which holds it weakly; RuntimeError if it has been destroyed."""
    found = group()
    if found is None:
        raise RuntimeError("the process group of a plan must exist as long as the plan is used; it has been destroyed.")
    return found

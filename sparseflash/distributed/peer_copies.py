"""Rows go from rank to rank by copies out of each other's memory.

Each rank lays its rows into a buffer, and the others fetch theirs. GPUs that can read each other's memory do it by copy
engines beside attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sparseflash.distributed.shards import Integers
from sparseflash.distributed.transport import Message, Wait, places_of


class PeerMemory(Protocol):
    """A buffer of each rank that all ranks of the group can read: uint8 `[size]` each."""

    size: int

    def of(self, rank: int) -> Tensor:
        """The buffer of a rank."""

    def barrier(self) -> None:
        """On the current stream, waits until all ranks are here and their earlier writes can be read."""


class PeerCopies:
    """Rows are laid into a buffer of this rank, and the other ranks copy them from there.

    Other ranks may read rows between the barrier after they were written and the one before their place is written
    again. An exchange takes the room that the largest sender needs on every rank, so all ranks compute its place
    without communication.

    `allocate`: makes the buffer, a collective call; `stream`: of the copies, None on a CPU.
    """

    overlaps = True

    def __init__(self, rank: int, allocate: Callable[[int], PeerMemory], stream: torch.cuda.Stream | None) -> None:
        self.rank, self.allocate, self.stream = rank, allocate, stream
        self.memory: PeerMemory | None = None
        self.used = 0
        self._last: torch.cuda.Event | None = None  # after the last barrier, on any stream

    def begin(self, room: Callable[[], int]) -> None:
        if size := room():
            self._make_room(size)

    @torch.no_grad()  # `index_select` into the buffer would refuse gradients of gradients
    def start(self, tensors: Sequence[Tensor], message: Message) -> tuple[list[Tensor], Wait]:
        table = message.between()
        received = [x.new_empty((sum(message.incoming), x.shape[1])) for x in tensors]
        if not table.any():  # on no rank
            return received, lambda: None
        memory, places = self._placed(tensors, message, table)
        first = np.cumsum(table, axis=1) - table  # [from, to]: the first row of a rank for another rank
        self._barrier(memory)
        with self._beside():
            for rows, place in zip(received, places, strict=True):
                size, flat, at = _row_bytes(rows), rows.view(-1).view(torch.uint8), 0
                for source, count in enumerate(message.incoming):
                    begin, length = place + int(first[source, self.rank]) * size, count * size
                    if count:
                        flat[at : at + length].copy_(memory.of(source)[begin : begin + length])
                    at += length
                if self.stream is not None:
                    rows.record_stream(self.stream)  # if nobody waits, because something failed, it is still written
        event = self._copied()
        return received, lambda: self._wait_for(event)

    def _placed(self, tensors: Sequence[Tensor], message: Message, table: Integers) -> tuple[PeerMemory, list[int]]:
        row_bytes = [_row_bytes(x) for x in tensors]
        *offsets, room = places_of(table, row_bytes)
        memory = self._make_room(room)
        places = [self.used + offset for offset in offsets]
        self.used += room
        for x, place, size in zip(tensors, places, row_bytes, strict=True):
            end = place + sum(message.outgoing) * size
            lines = memory.of(self.rank)[place:end].view(x.dtype).view(-1, x.shape[1])
            if message.taken is None:
                lines.copy_(x)
            else:
                message.taken.taken(x, out=lines)
        return memory, places

    def _make_room(self, room: int) -> PeerMemory:
        if self.stream is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "transport must be 'collective' to record CUDA graphs; replays would not know of each other's rows in "
                "the buffer of 'peer'."
            )
        memory = self.memory
        if memory is None or room > memory.size:
            if memory is not None:
                self._until_nobody_reads(memory)
                if self.stream is not None:
                    torch.cuda.current_stream(self.stream.device).synchronize()
            memory = self.memory = None
            memory = self.memory = self.allocate(room)
            self.used = 0
        elif self.used + room > memory.size:
            self._until_nobody_reads(memory)
            self.used = 0
        return memory

    def _until_nobody_reads(self, memory: PeerMemory) -> None:
        """On the current stream, waits until the copies of all ranks have ended."""
        self._wait_for(self._copied())
        self._barrier(memory)

    def _barrier(self, memory: PeerMemory) -> None:
        """A barrier after the barriers of this process's other streams: on every rank they come in the same order."""
        self._wait_for(self._last)
        memory.barrier()
        if self.stream is not None:
            self._last = torch.cuda.current_stream(self.stream.device).record_event()

    def _copied(self) -> torch.cuda.Event | None:
        return None if self.stream is None else self.stream.record_event()

    def _wait_for(self, event: torch.cuda.Event | None) -> None:
        if self.stream is not None and event is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(event)

    def _beside(self) -> contextlib.AbstractContextManager[object]:
        if self.stream is None:
            return contextlib.nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        return torch.cuda.stream(self.stream)


def _row_bytes(x: Tensor) -> int:
    return x.shape[1] * x.element_size()

"""How rows go from rank to rank: by a collective of the group, or by copies out of each other's memory.

A collective copies by programs that occupy some of a GPU's multiprocessors. Attention occupies all of them, so the two
take turns, and ranks wait for each other. Where the GPUs of a group can read each other's memory, copy engines do it
beside attention: a rank lays the rows for all others into a buffer that they can read, and each fetches its own.
"""

from __future__ import annotations

import contextlib
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sparseflash.distributed.rows import Rows
from sparseflash.distributed.shards import Integers

TransportName = Literal["auto", "collective", "peer"]
TRANSPORTS = ("auto", "collective", "peer")
Wait = Callable[[], None]
_ALIGNMENT = 128  # bytes, of what copy engines and vector instructions like


@dataclass(frozen=True)
class Message:
    """The rows that go between ranks in one exchange.

    `taken`: which rows of a tensor are sent, those for rank 0 first; None if the tensor has just these; `outgoing`,
    `incoming`: rows for and from each rank; `between`: int64 `[from, to]`, those of all ranks.
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
        """Announces exchanges of together so many bytes (see `room_of`), which shall not wait for each other."""

    def start(self, tensors: Sequence[Tensor], message: Message) -> tuple[list[Tensor], Wait]:
        """Starts sending rows of tensors `[rows, D]`: `(rows that will come of each, what waits for them)`."""


def room_of(between: Integers, row_bytes: Sequence[int]) -> int:
    """The bytes that an exchange of tensors with rows of so many bytes takes in a buffer, on every rank."""
    most = int(between.sum(1).max())
    return sum(_aligned(most * each) for each in row_bytes)


class Collectives:
    """An all-to-all of the group for each tensor."""

    overlaps = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weakref.ref(group)

    def begin(self, room: Callable[[], int]) -> None:
        """Needs nothing."""

    def start(self, tensors: Sequence[Tensor], message: Message) -> tuple[list[Tensor], Wait]:
        """See `Transport`."""
        received, works, sending = [], [], []  # what is sent must live until it has been
        for x in tensors:
            data = (x if message.taken is None else message.taken.taken(x)).contiguous()
            rows = data.new_empty((sum(message.incoming), data.shape[1]))
            # As bytes, so that every backend of torch.distributed takes every dtype.
            works.append(dist.all_to_all_single(
                rows.view(torch.uint8), data.view(torch.uint8), message.incoming, message.outgoing,
                group=self.group(), async_op=True,
            ))  # fmt: skip
            received.append(rows)
            sending.append(data)

        def wait() -> None:
            for work in works:
                work.wait()
            sending.clear()

        return received, wait


class PeerMemory(Protocol):
    """A buffer of each rank that all ranks of the group can read: uint8 `[size]` each."""

    size: int

    def of(self, rank: int) -> Tensor:
        """The buffer of a rank."""

    def barrier(self) -> None:
        """On the current stream, waits until all ranks are here and what they wrote before can be read."""


class PeerCopies:
    """Rows are laid into a buffer of this rank, from which the others copy them.

    Between a barrier after the rows have been written and one before their place is written again, others may read
    them. All ranks use their buffers alike: an exchange takes the room that it takes on the rank that sends most. So
    they agree without talking on where it lies, and on when the buffer is full and begun anew.

    `allocate`: makes the buffer, a collective call.
    """

    overlaps = True

    def __init__(self, rank: int, allocate: Callable[[int], PeerMemory], stream: torch.cuda.Stream | None) -> None:
        self.rank, self.allocate, self.stream = rank, allocate, stream
        self.memory: PeerMemory | None = None
        self.used = 0

    def begin(self, room: Callable[[], int]) -> None:
        """See `Transport`."""
        self._make_room(room())

    def _make_room(self, room: int) -> None:
        size = 0 if self.memory is None else self.memory.size
        if room > size:
            self._replace(room)
        elif self.used + room > size or _is_recorded(self.stream):  # a recorded graph replays after any other call
            self._begin_anew()

    def start(self, tensors: Sequence[Tensor], message: Message) -> tuple[list[Tensor], Wait]:
        """See `Transport`."""
        table = message.between()
        most = int(table.sum(1).max())
        room = room_of(table, [_row_bytes(x) for x in tensors])
        if self.memory is None or self.used + room > self.memory.size:
            self._make_room(room)
        assert self.memory is not None
        places = []
        for x in tensors:
            size = sum(message.outgoing) * _row_bytes(x)
            lines = self.memory.of(self.rank)[self.used : self.used + size].view(x.dtype).view(-1, x.shape[1])
            if message.taken is None or message.taken.are_all(len(x)):
                lines.copy_(x)
            else:
                torch.index_select(x, 0, message.taken.on(x.device), out=lines)
            places.append(self.used)
            self.used += _aligned(most * _row_bytes(x))
        received = [x.new_empty((sum(message.incoming), x.shape[1])) for x in tensors]
        self.memory.barrier()
        first = np.cumsum(table, axis=1) - table  # [from, to]: which row of those of a rank is the first for another
        with self._beside():
            for rows, place in zip(received, places, strict=True):
                size, flat, at = _row_bytes(rows), rows.view(-1).view(torch.uint8), 0
                for source, count in enumerate(message.incoming):
                    begin, length = place + int(first[source, self.rank]) * size, count * size
                    if count:
                        flat[at : at + length].copy_(self.memory.of(source)[begin : begin + length])
                    at += length
        return received, self._until_now()

    def _beside(self) -> contextlib.AbstractContextManager[object]:
        """Work that is beside the current stream, and comes after what was given to that before."""
        if self.stream is None:
            return contextlib.nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        return torch.cuda.stream(self.stream)

    def _until_now(self) -> Wait:
        """Lets the current stream wait for the copies that have been started so far."""
        if self.stream is None:
            return lambda: None
        event, device = self.stream.record_event(), self.stream.device
        return lambda: torch.cuda.current_stream(device).wait_event(event)

    def _begin_anew(self) -> None:
        """Waits until nobody reads the buffer any more."""
        assert self.memory is not None
        self._until_now()()
        self.memory.barrier()
        self.used = 0

    def _replace(self, size: int) -> None:
        if self.memory is not None:
            self._begin_anew()
            if self.stream is not None:
                torch.cuda.current_stream(self.stream.device).synchronize()  # then the others have passed the barrier
        self.memory = None
        self.memory = self.allocate(size)
        self.used = 0


class SymmetricMemory:
    """`PeerMemory` on CUDA devices, by PyTorch's symmetric memory."""

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.size = size
        self.buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        self.handle = symmetric_memory.rendezvous(self.buffer, group)
        self.buffers = [
            self.buffer if rank == dist.get_rank(group) else self.handle.get_buffer(rank, (size,), torch.uint8)
            for rank in range(dist.get_world_size(group))
        ]
        timeout = group._get_backend(device).options._timeout  # what bounds a collective of the group
        self.timeout_ms = round(1e3 * timeout.total_seconds())

    def of(self, rank: int) -> Tensor:
        """See `PeerMemory`."""
        return self.buffers[rank]

    def barrier(self) -> None:
        """See `PeerMemory`; where a rank does not come within the group's timeout, an error of the device."""
        self.handle.barrier(0, self.timeout_ms)


# Each ends with its group. Not emptied by `clear_caches`: ranks must make and leave buffers together.
_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, Transport]] = weakref.WeakKeyDictionary()


def transport_of(group: dist.ProcessGroup, device: torch.device, name: TransportName) -> Transport:
    """The transport of a group between tensors on a device; the first call is a collective one.

    ValueError, on all ranks, if it is to be "peer" and cannot.
    """
    made = _transports.setdefault(group, {})
    key = device, name
    if key not in made:
        reason = "" if name == "collective" else why_not_peer(group, device)
        if name == "peer" and reason:
            raise ValueError(f"transport must be 'collective' or 'auto' here; 'peer' is not possible: {reason}.")
        if name == "collective" or reason:
            made[key] = Collectives(group)
        else:  # one, however it was asked for
            other = device, "peer" if name == "auto" else "auto"
            made[key] = made.get(other) or peer_copies(group, device)
    return made[key]


def peer_copies(group: dist.ProcessGroup, device: torch.device) -> PeerCopies:
    """Copies between the GPUs of a group."""
    known = weakref.ref(group)

    def allocate(size: int) -> PeerMemory:
        group = known()
        assert group is not None
        return SymmetricMemory(size, group, device)

    return PeerCopies(dist.get_rank(group), allocate, torch.cuda.Stream(device))


def why_not_peer(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why the ranks of a group cannot read each other's memory, the same on all of them; empty if they can."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}, not on CUDA devices"
    mine = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    found = _gathered(mine, group)
    hosts, uuids = {host for host, _ in found}, [uuid for _, uuid in found]
    if len(hosts) > 1:
        reason = f"the group is on {len(hosts)} hosts"
    elif len(set(uuids)) < len(uuids):
        reason = "several ranks share a GPU"
    else:
        visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
        others = [visible.get(uuid) for uuid in uuids if uuid != mine[1]]
        reads = all(other is not None and torch.cuda.can_device_access_peer(device, other) for other in others)
        reason = "" if reads else f"rank {dist.get_rank(group)} cannot read the memory of another rank's GPU"
    return next(filter(None, _gathered(reason, group)), "")


def _gathered(value: object, group: dist.ProcessGroup) -> list:  # type: ignore[type-arg]
    found: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _row_bytes(x: Tensor) -> int:
    return x.shape[1] * x.element_size()


def _is_recorded(stream: torch.cuda.Stream | None) -> bool:
    return stream is not None and torch.cuda.is_current_stream_capturing()

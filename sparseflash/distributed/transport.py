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
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sparseflash.distributed.rows import Rows
from sparseflash.distributed.shards import Integers

TransportName = Literal["auto", "collective", "peer"]
TRANSPORTS = ("auto", "collective", "peer")
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
    return _places(between, row_bytes)[-1]


def _places(between: Integers, row_bytes: Sequence[int]) -> list[int]:
    """Where each tensor's rows begin in a buffer, and where the last end: the same for what goes back, and on all
    ranks.
    """
    most = int(max(between.sum(1).max(), between.sum(0).max()))
    sizes = [-(-most * each // _ALIGNMENT) * _ALIGNMENT for each in row_bytes]
    return [0, *np.cumsum(sizes).tolist()]


class Collectives:
    """An all-to-all of the group for each tensor."""

    overlaps = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weakref.ref(group)

    def begin(self, room: Callable[[], int]) -> None:
        """Needs nothing."""

    def start(self, tensors: Sequence[Tensor], message: Message) -> tuple[list[Tensor], Wait]:
        """See `Transport`."""
        group = _alive(self.group)
        received, works, sending = [], [], []  # what is sent must live until it has been
        for x in tensors:
            data = (x if message.taken is None else message.taken.taken(x)).contiguous()
            rows = data.new_empty((sum(message.incoming), data.shape[1]))
            # As bytes, so that every backend of torch.distributed takes every dtype.
            works.append(dist.all_to_all_single(
                rows.view(torch.uint8), data.view(torch.uint8), message.incoming, message.outgoing,
                group=group, async_op=True,
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

    `allocate`: makes the buffer, a collective call; `stream`: of the copies, None on a CPU, where nothing is beside
    anything.
    """

    overlaps = True

    def __init__(self, rank: int, allocate: Callable[[int], PeerMemory], stream: torch.cuda.Stream | None) -> None:
        self.rank, self.allocate, self.stream = rank, allocate, stream
        self.memory: PeerMemory | None = None
        self.used = 0
        self._last: torch.cuda.Event | None = None  # after the last barrier, on whatever stream

    def begin(self, room: Callable[[], int]) -> None:
        """See `Transport`."""
        if size := room():
            self._make_room(size)

    @torch.no_grad()  # `index_select` into the buffer would refuse gradients of gradients
    def start(self, tensors: Sequence[Tensor], message: Message) -> tuple[list[Tensor], Wait]:
        """See `Transport`."""
        table = message.between()
        received = [x.new_empty((sum(message.incoming), x.shape[1])) for x in tensors]
        if not table.any():  # on no rank
            return received, lambda: None
        memory, places = self._placed(tensors, message, table)
        first = np.cumsum(table, axis=1) - table  # [from, to]: which row of those of a rank is the first for another
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
        """Lays the rows into the buffer: the buffer, and where in it those of each tensor begin."""
        row_bytes = [_row_bytes(x) for x in tensors]
        *offsets, room = _places(table, row_bytes)
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
        """The buffer, with so many bytes left."""
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
            memory = self.memory = None  # frees it
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
        """A barrier after those of this process's other streams: on every rank they come in the same order."""
        self._wait_for(self._last)
        memory.barrier()
        if self.stream is not None:
            self._last = torch.cuda.current_stream(self.stream.device).record_event()

    def _copied(self) -> torch.cuda.Event | None:
        """When the copies that have been started so far have ended."""
        return None if self.stream is None else self.stream.record_event()

    def _wait_for(self, event: torch.cuda.Event | None) -> None:
        """Lets the current stream wait."""
        if self.stream is not None and event is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(event)

    def _beside(self) -> contextlib.AbstractContextManager[object]:
        """For work beside the current stream that comes after what that was given before."""
        if self.stream is None:
            return contextlib.nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        return torch.cuda.stream(self.stream)


class SymmetricMemory:
    """`PeerMemory` on CUDA devices, by PyTorch's symmetric memory."""

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.size = size
        torch.cuda.empty_cache()  # the buffer is not of PyTorch's memory, which may hold all there is
        failure = ""
        try:
            self.buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            failure = str(error)
        for rank, each in enumerate(_gathered(failure, group, device)):
            if each:  # before the others wait for this rank
                raise RuntimeError(f"a buffer of {size:,} bytes cannot be allocated on rank {rank}: {each}")
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


class _Transports:
    """What can carry rows between the ranks of a group, from and to tensors on one device.

    Making it is a collective call, the same whatever transport is wanted: ranks that want different ones find out
    later, when they compare all options of a call.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.collectives = Collectives(group)
        self.refused = why_not_peer(group, device)
        self.peer_copies = None if self.refused else peer_copies(group, device)


# An entry, and with it its buffer, ends with its group. `clear_caches` leaves it, because ranks must make and leave
# buffers together.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, _Transports]] = weakref.WeakKeyDictionary()


def transport_of(group: dist.ProcessGroup, device: torch.device, name: TransportName) -> Transport:
    """The transport of a group between tensors on a device; the first call is a collective one.

    ValueError, on all ranks, if it is to be "peer" and cannot.
    """
    of_group = _made.setdefault(group, {})
    found = of_group.get(device)
    if found is None:
        found = of_group[device] = _Transports(group, device)
    if name == "collective" or (name == "auto" and found.peer_copies is None):
        return found.collectives
    if found.peer_copies is None:
        raise ValueError(f"transport must be 'collective' or 'auto' here; 'peer' is not possible: {found.refused}.")
    return found.peer_copies


def peer_copies(group: dist.ProcessGroup, device: torch.device) -> PeerCopies:
    """Copies between the GPUs of a group."""
    known = weakref.ref(group)  # the group is a key of what holds them
    return PeerCopies(
        dist.get_rank(group), lambda size: SymmetricMemory(size, _alive(known), device), torch.cuda.Stream(device)
    )


def why_not_peer(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why the ranks of a group cannot read each other's memory, the same on all of them; empty if they can."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}, not on CUDA devices"
    mine = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid), device.index
    found = _gathered(mine, group, device)
    hosts, uuids, indices = (set(each) for each in zip(*found, strict=True))
    if len(found) == 1:
        reason = "the group has one rank"
    elif len(hosts) > 1:
        reason = f"the group is on {len(hosts)} hosts"
    elif len(uuids) < len(found) or len(indices) < len(found):
        reason = "ranks share a GPU, or number their GPUs alike"  # which PyTorch's symmetric memory refuses
    else:
        visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
        others = [visible.get(uuid) for uuid in uuids if uuid != mine[1]]
        reads = all(other is not None and torch.cuda.can_device_access_peer(device, other) for other in others)
        reason = "" if reads else f"rank {dist.get_rank(group)} cannot read the memory of another rank's GPU"
    return next(filter(None, _gathered(reason, group, device)), "")


def _gathered(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    with torch.cuda.device(device):  # by which NCCL sends what it is given
        dist.all_gather_object(found, value, group=group)
    return found


def _alive(group: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    found = group()
    if found is None:
        raise RuntimeError("the process group of a plan must exist as long as the plan is used; it has been destroyed.")
    return found


def _row_bytes(x: Tensor) -> int:
    return x.shape[1] * x.element_size()

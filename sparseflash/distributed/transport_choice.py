"""The transport of a group: copies if its GPUs can read each other's memory, otherwise its collectives."""

from __future__ import annotations

import weakref
from typing import Literal

import torch
import torch.distributed as dist

from sparseflash.distributed.collectives import Collectives
from sparseflash.distributed.peer_copies import PeerCopies
from sparseflash.distributed.symmetric_memory import SymmetricMemory, why_not_peer
from sparseflash.distributed.transport import Transport, alive

TransportName = Literal["auto", "collective", "peer"]
TRANSPORTS = ("auto", "collective", "peer")


class _Transports:
    """Making them is a collective call, whatever transport is wanted."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.collectives = Collectives(group)
        self.refused = why_not_peer(group, device)
        self.peer_copies = None if self.refused else peer_copies(group, device)


# An entry, and its buffer, ends with its group. `clear_caches` leaves it, because ranks must make and leave buffers
# together.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, _Transports]] = weakref.WeakKeyDictionary()


def transport_of(group: dist.ProcessGroup, device: torch.device, name: TransportName) -> Transport:
    """The transport of a group between tensors on a device; the first call is a collective one.

    Raises ValueError, on all ranks, if `name` is "peer" and peer copies are impossible.
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
    known = weakref.ref(group)  # a cache entry must not keep the group, its key, alive
    return PeerCopies(
        dist.get_rank(group), lambda size: SymmetricMemory(size, alive(known), device), torch.cuda.Stream(device)
    )

"""Memory that all GPUs of a group can read, by PyTorch's symmetric memory, or the reason why it is impossible."""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SymmetricMemory:
    """`PeerMemory` on CUDA devices, by PyTorch's symmetric memory."""

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.size = size
        torch.cuda.empty_cache()  # the buffer does not come from PyTorch's cache, which may hold all memory
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
        timeout = group._get_backend(device).options._timeout
        self.timeout_ms = round(1e3 * timeout.total_seconds())

    def of(self, rank: int) -> Tensor:
        return self.buffers[rank]

    def barrier(self) -> None:
        """See `PeerMemory`; a device error if a rank does not come within the group's timeout."""
        self.handle.barrier(0, self.timeout_ms)


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
        reason = "ranks share a GPU, or number their GPUs alike"  # PyTorch's symmetric memory refuses both
    else:
        visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
        others = [visible.get(uuid) for uuid in uuids if uuid != mine[1]]
        reads = all(other is not None and torch.cuda.can_device_access_peer(device, other) for other in others)
        reason = "" if reads else f"rank {dist.get_rank(group)} cannot read the memory of another rank's GPU"
    return next(filter(None, _gathered(reason, group, device)), "")


def _gathered(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    with torch.cuda.device(device):  # NCCL sends from the current device
        dist.all_gather_object(found, value, group=group)
    return found

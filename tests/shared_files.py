"""Memory that processes on one machine share, in place of the GPUs' own, so that copies out of it run on CPUs."""

import os
import tempfile
import time
from unittest import mock

import torch
import torch.distributed as dist

from sparseflash.distributed import transport


class SharedFiles:
    """`transport.PeerMemory` in files. Reading takes longer on some ranks than on others, so that what is written too
    early is seen."""

    def __init__(self, size, group):
        self.size, self.group, self.rank = size, group, dist.get_rank(group)
        number, name = tempfile.mkstemp()
        os.truncate(number, size)
        os.close(number)
        names = [None] * dist.get_world_size(group)
        dist.all_gather_object(names, name, group=group)
        self.buffers = [torch.from_file(each, shared=True, size=size, dtype=torch.uint8) for each in names]
        self.barrier()  # everyone has opened it
        os.unlink(name)

    def of(self, rank):
        if rank != self.rank:
            time.sleep(5e-4 * self.rank)
        return self.buffers[rank]

    def barrier(self):
        dist.barrier(self.group)


def make_peer_transport(group, device):
    """Makes the transport of a group for `transport="peer"`, between processes on CPUs."""

    def peer_copies(group, device):
        return transport.PeerCopies(dist.get_rank(group), lambda size: SharedFiles(size, group), None)

    with mock.patch.multiple(transport, why_not_peer=lambda group, device: "", peer_copies=peer_copies):
        transport.transport_of(group, device, "peer")

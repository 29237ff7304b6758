import os
import tempfile
import time

import torch
import torch.distributed as dist

from sparseflash.distributed.peer_copies import PeerCopies


class SharedFiles:
    """`PeerMemory` in files. Some ranks read slowly, which shows writes that come too early."""

    def __init__(self, size, group):
        self.size, self.group, self.rank = size, group, dist.get_rank(group)
        number, name = tempfile.mkstemp()
        os.truncate(number, size)
        os.close(number)
        names = [None] * dist.get_world_size(group)
        dist.all_gather_object(names, name, group=group)
        self.buffers = [torch.from_file(each, shared=True, size=size, dtype=torch.uint8) for each in names]
        self.barrier()
        os.unlink(name)

    def of(self, rank):
        if rank != self.rank:
            time.sleep(5e-4 * self.rank)
        return self.buffers[rank]

    def barrier(self):
        dist.barrier(self.group)


def copies_of_files(group):
    return PeerCopies(dist.get_rank(group), lambda size: SharedFiles(size, group), None)

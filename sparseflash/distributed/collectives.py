"""Rows go from rank to rank by a collective of the group.

Its programs occupy some of a GPU's multiprocessors, so it and attention take turns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sparseflash.distributed.transport import Message, Wait, alive


class Collectives:
    """An all-to-all of the group for each tensor."""

    overlaps = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weakref.ref(group)

    def begin(self, room: Callable[[], int]) -> None:
        pass

    def start(self, tensors: Sequence[Tensor], message: Message) -> tuple[list[Tensor], Wait]:
        group = alive(self.group)
        received, works, sending = [], [], []  # sent tensors must live until they have been sent
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

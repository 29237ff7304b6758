"""The host of a GPU that trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def host_threads(device: torch.device) -> Iterator[None]:
    """Inside, the host has one thread where a GPU computes.

    It copies arrays, and threads that wait for the next one take the cores of other processes: of those that make the
    images, and of other runs. Four runs on a host of 64 cores had a load of 300 and a fifth of their speed or less
    (results/pathx/notes.md).
    """
    if device.type != "cuda":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

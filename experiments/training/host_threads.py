"""How many threads the host uses while a GPU trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def single_host_thread(device: torch.device) -> Iterator[None]:
    """Inside the context, PyTorch uses one host thread if `device` is a GPU; on the CPU nothing changes.

    With a GPU the host only copies arrays. More threads would spin while they wait for the next copy, and take cores
    away from the processes that make the batches and from other runs: four runs on a host of 64 cores had a load of 300
    and a fifth of their speed or less (results/tried/pathx.md).
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

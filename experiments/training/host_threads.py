"""The number of host threads while a GPU trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def single_host_thread(device: torch.device) -> Iterator[None]:
    """Inside the context, PyTorch uses one host thread if `device` is a GPU; on a CPU nothing changes.

    With a GPU the host only copies arrays. Further threads would spin between copies, and slow down data workers and
    other runs.
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

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def single_host_thread(device: torch.device) -> Iterator[None]:
    """One host thread inside the context if `device` is a GPU: further ones would spin between copies."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

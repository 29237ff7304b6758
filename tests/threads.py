"""How many threads PyTorch computes with."""

from contextlib import contextmanager

import torch


@contextmanager
def threads(number):
    """So many inside the context, and afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)

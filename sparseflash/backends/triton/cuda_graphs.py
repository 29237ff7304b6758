"""Refuses to plan while a CUDA graph is recorded.

Recorded work runs only when the graph is replayed, and reads the same memory at every replay. `blockmask/streams.py`
keeps that memory alive.
"""

from __future__ import annotations

import torch

from sparseflash.blockmask import streams


def refuse_to_record(device: torch.device) -> None:
    """Raises RuntimeError while a graph is being recorded: a plan cached now would be filled only at a replay."""
    if streams.is_capturing(device):
        raise RuntimeError(
            "attention makes the execution plan of a mask and loads its kernels at the first call, which a CUDA graph "
            "cannot record: before the capture, call it once with the same mask and tensors of the same layout, "
            "forward and, if that is recorded, backward."
        )

"""CUDA graphs: what is recorded runs only when the graph is replayed, and reads the same memory every time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparseflash.blockmask import streams

if TYPE_CHECKING:
    from sparseflash.backends.triton.schedule.plan import Plan

_recorded: dict[int, Plan] = {}


def refuse_to_record(device: torch.device) -> None:
    """Raises RuntimeError while a graph is recorded: what is made now and kept would be empty until a replay."""
    if streams.is_capturing(device):
        raise RuntimeError(
            "attention makes the execution plan of a mask at its first call, which a CUDA graph cannot record: call it "
            "once with the same mask and tensors of the same layout, forward and, if it is recorded, backward, before "
            "the capture."
        )


def keep_if_recorded(plan: Plan) -> None:
    """Keeps a plan for good if a graph is being recorded, whose replays will read it whatever becomes of the mask."""
    if plan.lasting and streams.is_capturing(plan.device):
        _recorded[id(plan)] = plan

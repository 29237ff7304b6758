"""Launches of the kernels that merge partial results, for every family; see `device_functions/combine.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.triton.device_functions.combine import TOKENS_TO_COMBINE
from sparseflash.backends.triton.launch.launches import SOME_PARTS, launch_of
from sparseflash.backends.triton.launcher import BoundLaunch, Launch


def merge_launch(
    function: Any, constants: Mapping[str, Any], numbers: Mapping[str, Any], examples: Mapping[str, Any],
    device: torch.device,
) -> Launch:  # fmt: skip
    """The launch of a kernel of `combine.py`, not bound to work."""
    return launch_of(
        function, constants, numbers, {"parts_ptr": SOME_PARTS, **examples}, device, {}, bound=("merged_ptr",),
        num_warps=4, num_stages=2,
    )  # fmt: skip


def bind_merge(launch: Launch, merged: Tensor, tile: int, tokens: int = TOKENS_TO_COMBINE) -> BoundLaunch:
    """Binds a launch to the items `merged [cut, CUT_ITEM]` of `tile` tokens each, with `tokens` tokens per program."""
    return launch.bind(len(merged) * (tile // tokens), merged_ptr=merged)

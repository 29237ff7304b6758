"""Choices at every step in a few launches: the rules of `chosen_blocks` and `chosen_keys` as Triton kernels.

Written in PyTorch's operations, as those two modules have them, a choice is thirty to sixty calls, and on a GPU all of
its time is the host's, 10 to 30 us for each; together that is more than attention itself takes. Here it is two to four
launches. What they keep is the same; `serves` says when they are used. CPU tensors, fp64, very long rows and what
torch.compile traces (which fuses the operations itself) go the other way.

- `rows`: the blocks of a row of scores by rank or by mass, and the arrays of the mask of what is kept.
- `runs`: the tiles with a chosen run of keys in them, and their bits.

May import `tiling`, `sparseflash.blockmask` and the `launcher` of the Triton backend. For the families that choose.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from sparseflash.backends.triton.launcher import OLDEST
from sparseflash.blockmask.cache import bounded

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# A row is ranked by comparing each block with each other one; longer ones are sorted faster than that.
LONGEST_ROW = 1024
_DEVICES = ["cuda"]  # tests add the CPU, where the interpreter runs


def serves(x: Tensor, row_blocks: int, col_blocks: int) -> bool:
    """Whether the choice by `x` among this many tiles is made here."""
    return (
        not torch.compiler.is_compiling()
        and x.device.type in _DEVICES
        and col_blocks <= LONGEST_ROW
        and x.numel() < 2**31
        and row_blocks * col_blocks * x.shape[0] * x.shape[1] < 2**31
        and type(x) is Tensor  # no fake one, nor one that is being traced
        and _runs_triton(x.device)
    )


@bounded(maxsize=32)
def _runs_triton(device: torch.device) -> bool:
    new_enough = device.type != "cuda" or torch.cuda.get_device_capability(device) >= OLDEST
    return new_enough and find_spec("triton") is not None

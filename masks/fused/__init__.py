"""The choices of `chosen_blocks`, `chosen_keys` and `block_index` as Triton kernels, for masks made at every step.

CPU tensors, fp64, very long rows and code that torch.compile traces (which fuses the operations itself) use PyTorch's
operations.

- `rows`: chooses the blocks of a row of scores by rank or by mass, and makes the arrays of the mask.
- `runs`: finds the tiles that hold a chosen run of keys, and makes their bits.
- `index`: sorts the lists of chosen blocks, and makes the arrays of the mask.
- `select`: the best blocks of each list, from queries and keys; `tile_scores`: the scores of a tile of keys.
- `block_scores`: the same for long lists, by `largest`: the largest scores of each row, however many.
- `summed_scores`: scores that are summed over heads, of an indexer or of compressed keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.backends.triton.device import runs_kernels

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LONGEST_ROW = 1024
LONGEST_LIST = 128  # of chosen blocks, which are compared with one another, too
_DEVICES = ["cuda"]  # tests add the CPU, for the interpreter


def serves(x: Tensor, row_blocks: int, in_row: int, *, longest: int = LONGEST_ROW) -> bool:
    """Whether the kernels here make the choice by `x` among `in_row` tiles of each row, which are at most `longest`."""
    return (
        not torch.compiler.is_compiling()
        and x.device.type in _DEVICES
        and in_row <= longest
        and x.numel() < 2**31
        and row_blocks * in_row * x.shape[0] * x.shape[1] < 2**31
        and type(x) is Tensor  # neither a fake tensor nor one that is being traced
        and runs_kernels(x.device)
    )

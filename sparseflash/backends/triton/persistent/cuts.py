"""Decides which items of the backward are cut into parts.

One program computes an item. An item longer than a program's mean load, such as the column of a global token, would
still run when all others are done. It is cut into parts of consecutive entries, each an item of the plan that writes
fp32 sums of dk and dv; `device_functions/combine.py` adds them in the order of the list. All numbers are integers, so
that `dealing.cut_kernel` decides the same on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rule(NamedTuple):
    """When items are cut. An item costs its entries plus one; `mean` is the total cost divided by the number of
    programs.

    If one item is far longer than most, the others fill the time that it leaves, so cutting it gains nearly all of its
    excess over `mean`. If all are alike, as in dense attention, parts do not come out even, so more must be gained.

    A part costs about an entry, to write its sums and to add them, and merging costs a launch of a few microseconds, so
    no part has fewer than 12 entries. There are at most `parts * programs` parts, plus one for every item that is cut.
    Each takes 128 KB of the workspace at D = 128.

    Load of the busiest of 132 programs over `mean`, in entries, and the number of parts:

        131,072 tokens in blocks of 128, 32 query heads on 8 KV heads
            bigbird                              1.61, cut 1.00     112
            one global column, else the diagonal 7.34, cut 1.01     240
            butterfly, local, causal             1.02, 1.01, 1.00     0
        131,072 tokens, 16 heads
            bigbird                              1.00                 0
        4,096 tokens, 4 query heads on 1, dense  4.12, cut 1.03     256
    """

    far: int = 4  # the longest is far longer than most beyond this many times the mean of all items
    worth: int = 5  # quarters of `mean` that an item must exceed in this case,
    worth_alike: int = 6  # and otherwise
    parts: int = 4  # a part has at most `mean / parts` entries,
    shortest: int = 16  # or this many, if more


RULE = Rule()
NEVER = Rule(shortest=1 << 30)


def parts_of(sizes: Tensor, programs: int, rule: Rule) -> Tensor:
    """The number of parts of each item of these `sizes`, in entries: int64, 1 where an item is not cut.

    >>> parts_of(torch.tensor([400] + 100 * [8]), 10, RULE).tolist()[:3]
    [13, 1, 1]
    """
    sizes = sizes.long()
    if not len(sizes):
        return sizes
    total, items = int(sizes.sum()), len(sizes)
    mean = -(-(total + items) // programs)
    longest = max(-(-mean // rule.parts), rule.shortest)
    is_far = int(sizes.max()) * items > rule.far * total
    least = mean * (rule.worth if is_far else rule.worth_alike)
    is_cut = (4 * sizes > least) & (2 * sizes > 3 * longest)
    return torch.where(is_cut, -(-sizes // longest), 1)


def most_items(items: int, programs: int) -> int:
    """An upper bound on the number of items once long ones are cut into parts."""
    return items + RULE.parts * programs

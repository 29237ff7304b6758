"""Which items of the backward are cut into parts.

An item (a tile of keys of one head of keys) is computed by one program. One that is longer than what a program has to
do on average, that of a global token, would still run when all others are done. It is cut into parts of consecutive
entries, each an item of its own in the plan, which writes fp32 sums of dk and dv to a workspace;
`portable/combine.py` adds them in the order of the list.

Numbers are integers, so that the kernel that decides the same on a GPU (`dealing.cut_kernel`) finds the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.triton.schedule.splits import Cuts, Items, cut_items


class Rule(NamedTuple):
    """When items are cut. An item costs its entries and one more; `mean` is the cost of all over the programs.

    If one item is far longer than most, the others fill what it leaves, so cutting it gains nearly all that it has more
    than `mean`. If all are alike, as those of dense attention, parts do not come out even, so more must be gained.

    A part costs about an entry, to write its sums and to add them, and merging costs a launch of a few microseconds, so
    no part has fewer than 12 entries. There are at most `parts * programs` of them, and one more for every item that is
    cut, each of which takes 128 KB of the workspace at D = 128.

    Entries of the program that has most over `mean`, 132 programs, and the number of parts:

        131,072 tokens in blocks of 128, 32 query heads on 8 heads of keys
            bigbird                              1.61, cut 1.00     112
            one global column, else the diagonal 7.34, cut 1.01     240
            butterfly, local, causal             1.02, 1.01, 1.00     0
        131,072 tokens, 16 heads
            bigbird                              1.00                 0
        4,096 tokens, 4 query heads on 1, dense  4.12, cut 1.03     256
    """

    far: int = 4  # times the mean of all items: the longest is far longer than most
    worth: int = 5  # quarters of `mean` that an item must exceed then,
    worth_alike: int = 6  # and otherwise
    parts: int = 4  # of `mean`
    shortest: int = 16  # entries: the most of a part where a quarter of `mean` is less


RULE = Rule()
NEVER = Rule(shortest=1 << 30)


def parts_of(sizes: Tensor, programs: int, rule: Rule) -> Tensor:
    """Into how many parts each of the items of these `sizes`, in entries, is cut: int64, 1 where it is not.

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


def cut(start: Tensor, size: Tensor, programs: int, rule: Rule) -> tuple[Items, Tensor]:
    """All items with those that are too long in parts; and the items that are cut, as `cut_items` returns them.

    start, size: int64 `[W, group]`, of the lists of each item.
    """
    number = torch.arange(len(size), device=size.device).unsqueeze(1)
    parts = parts_of(size.sum(1).cpu(), programs, rule)
    chosen = Cuts(parts.to(size.device), int(parts.sum()), int((parts > 1).sum()))
    return cut_items(Items(number, start, size, size, torch.zeros_like(number)), chosen)


def most_items(items: int, programs: int) -> int:
    """At least as many as so many items and the parts of those that are cut together."""
    return items + RULE.parts * programs

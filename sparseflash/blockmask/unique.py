"""Numbers for equal values: like `torch.unique`, but without sorting if the values lie close together.

Everything here synchronises with the device, to learn the number of distinct values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask.patterns import FEW_NUMBERS, Integers

FEW = 32  # up to this many tiles on the CPU, comparing their bytes in Python beats array operations
AT_ONCE = 1 << 16  # values handled at a time: temporaries of millions of values stay in a CPU's caches


def distinct(values: Tensor) -> tuple[Tensor, Tensor]:
    """`(found, number)`: the distinct values, int64 `[D]`, ascending, and the index in `found` of each value.

    >>> found, number = distinct(torch.tensor([7, 3, 7, -2]))
    >>> found.tolist(), number.tolist()
    ([-2, 3, 7], [2, 1, 2, 0])

    `values`: int64 `[E]`; `found[number] == values`.
    """
    if values.numel() == 0:
        return values, values
    least, span = _span(values)
    if _is_small(span, values):
        occurs = torch.zeros(span, dtype=torch.bool, device=values.device)
        place = values - least
        occurs[place] = True
        return occurs.nonzero().squeeze(1) + least, (occurs.cumsum(0) - 1)[place]
    ordered, order = values.sort()
    found, rank = torch.unique_consecutive(ordered, return_inverse=True)
    return found, torch.empty_like(order).scatter_(0, order, rank)


def number_by_first_appearance(values: Tensor) -> tuple[Tensor, Tensor]:
    """`(number, first)`: `values` numbered 0, 1, ... by first appearance, and the positions of the first appearances.

    `values`: int64 `[E]`; `values[first][number] == values`, and `first` ascends.

    >>> number, first = number_by_first_appearance(torch.tensor([7, 3, 7, 0]))
    >>> number.tolist(), first.tolist()
    ([0, 1, 0, 2], [0, 1, 3])
    """
    count = values.numel()
    if count == 0:
        return values, values
    least, span = _span(values)
    if _is_small(span, values):
        place = values - least
        first = torch.full((span,), count, device=values.device)
        first.scatter_reduce_(0, place, torch.arange(count, device=values.device), "amin")
        first, value = first.sort()
        first = first[: int((first < count).sum())]
        rank = torch.empty_like(value)
        rank[value] = torch.arange(span, device=values.device)
        return rank[place], first
    # The sort is stable, so each run of equal values starts with the first of them.
    ordered, order = values.sort(stable=True)
    starts = torch.ones(count, dtype=torch.bool, device=values.device)
    starts[1:] = ordered[1:] != ordered[:-1]
    first, run = order[starts].sort()
    rank = torch.empty_like(run)
    rank[run] = torch.arange(len(run), device=values.device)
    return torch.empty_like(order).scatter_(0, order, rank[starts.cumsum(0) - 1]), first


def number_combinations(codes: Sequence[Tensor]) -> tuple[Tensor, int]:
    """`(number, count)`: a number 0, 1, ... for each combination of codes that occurs, and the count of combinations.

    >>> number_combinations([torch.tensor([5, 5, 9, 5]), torch.tensor([1, 2, 1, 1])])
    (tensor([0, 1, 2, 0]), 3)

    `codes`: int tensors `[E]` of one length, on the CPU; two entries have the same number iff they are equal in every
    code.
    """
    if len(codes[0]) <= FEW_NUMBERS:
        few, first = first_combinations([code.numpy() for code in codes])
        return torch.from_numpy(few), len(first)
    number, count = torch.zeros_like(codes[0], dtype=torch.int64), min(1, len(codes[0]))
    for code in codes:
        least, span = _span(code)
        if span == 1 and count:
            continue
        # No overflow: there are at most E < 2^31 numbers, and the span of a realistic code is below 2^32.
        if not _is_small(count * span, number):
            found, number = distinct(number * span + (code - least))
            count = len(found)
            continue
        occurs = torch.zeros(count * span, dtype=torch.bool, device="cpu")
        for some, new in zip(number.split(AT_ONCE), code.split(AT_ONCE), strict=True):
            some.mul_(span).add_(new).sub_(least)
            occurs[some] = True
        rank = occurs.cumsum(0).sub_(1)
        for some in number.split(AT_ONCE):
            some.copy_(rank[some])
        count = int(rank[-1]) + 1
    return number, count


def first_combinations(codes: Sequence[Integers]) -> tuple[Integers, Integers]:
    """A number for each combination of codes that occurs, by first appearance, and where each one appears first.

    >>> number, first = first_combinations([np.array([5, 5, 9, 5]), np.array([2, 1, 1, 2])])
    >>> number.tolist(), first.tolist()
    ([0, 1, 2, 0], [0, 1, 2])

    `codes`: int arrays `[E]` of one length.
    """
    if len(codes[0]) <= FEW_NUMBERS:
        known: dict[tuple[int, ...], int] = {}
        first: list[int] = []
        number = []
        for place, each in enumerate(zip(*[code.tolist() for code in codes], strict=True)):
            if each not in known:
                known[each] = len(known)
                first.append(place)
            number.append(known[each])
        return np.array(number, dtype=np.int64), np.array(first, dtype=np.int64)
    numbers, firsts = number_by_first_appearance(number_combinations([torch.from_numpy(code) for code in codes])[0])
    return numbers.numpy(), firsts.numpy()


def _span(values: Tensor) -> tuple[int, int]:
    least, most = torch.stack(torch.aminmax(values)).tolist()
    return least, most - least + 1


def _is_small(span: int, values: Tensor) -> bool:
    return span <= max(1 << 12, 4 * len(values))

"""Sums the parts of the gradients of score modifications, in a fixed order: the bits are the same at every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def memory_argument(parts: Sequence[tuple[Tensor, ...]]) -> dict[str, Any]:
    """The argument `learned` of a kernel, if the kernel writes any gradients of score modifications."""
    return {"learned": tuple(parts)} if any(parts) else {}


def sink_gradient(logits: Tensor, lse: Tensor, drow: Tensor) -> Tensor:
    """The gradient of the sinks' logits, `[Hq]`.

    drow: the gradient of a sink's score, divided by the sink's weight, `[B, Hq, Nq]`.
    """
    # A query without keys contributes nothing. Its drow may be NaN, if its dlse is.
    empty = lse == -torch.inf
    weights = torch.exp(logits.float()[:, None] - lse.masked_fill(empty, torch.inf))
    return (weights * drow.masked_fill(empty, 0.0)).sum((0, 2))


def sums_of_groups(values: Tensor, group: Tensor, count: int, each: int | None, most: int | None = None) -> Tensor:
    """The sums of the rows of `values` in each group, `[count, ...]`, in the order of the rows.

    >>> sums_of_groups(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 0, 1]), 2, None).tolist()
    [[2.0], [5.0]]

    group: int64, the group of each row. each: the number of rows of every group, if it is the same for all. most: an
    upper bound of these numbers. If both are None, the host synchronises with the device.
    """
    group, order = torch.sort(group, stable=True)
    values = values[order]
    if each is not None:
        return values.view(count, each, *values.shape[1:]).sum(1)
    begin, end = (
        torch.searchsorted(group, torch.arange(count, device=group.device), right=right) for right in (False, True)
    )
    most = int((end - begin).max()) if most is None else most
    place = torch.arange(len(group), device=group.device) - begin[group]
    rows = torch.full((count, most), len(group), device=group.device)
    rows[group, place] = torch.arange(len(group), device=group.device)
    padded = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
    return padded[rows].sum(1)


def sums_of_runs(values: Tensor, group: Tensor, count: int, most: int) -> Tensor:
    """As `sums_of_groups`, for groups of 1 to `most` rows, most of them short.

    >>> sums_of_runs(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 0, 1]), 2, 2).tolist()
    [[2.0], [5.0]]

    Rows are added to earlier rows of their group in steps of 1, 2, 4, ... So memory does not grow with the number of
    groups times the longest group.
    """
    group, order = torch.sort(group, stable=True)
    values = values[order]
    summed = 1
    while summed < most:
        is_same = (group[summed:] == group[:-summed]).view(-1, *[1] * (values.ndim - 1))
        values[:-summed] += torch.where(is_same, values[summed:], 0.0)
        summed *= 2
    return values[torch.searchsorted(group, torch.arange(count, device=group.device))]


def over_shared(gradient: Tensor, values: Tensor) -> Tensor:
    """The sum over the dimensions that `values` shares."""
    shared = [axis for axis, n in enumerate(values.shape) if n == 1 and gradient.shape[axis] != 1]
    return gradient.sum(shared, keepdim=True) if shared else gradient

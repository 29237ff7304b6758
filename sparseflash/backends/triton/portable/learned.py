"""Sums the gradients of the learned tensors of score modifications.

Every program writes its part of a gradient to its own memory, and the parts are summed in a fixed order. There are no
atomics, so the bits are the same at every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseflash.backends.triton.schedule.work_item import ITEM_NUMBER
from sparseflash.scores.change import Scores

if TYPE_CHECKING:
    from sparseflash.backends.triton.changes.kinds import Changed
    from sparseflash.backends.triton.portable.launches import Bound, Numbers


class Call:
    """One call of a backward, for `Kind.memory` and `Kind.gradients`: allocates memory for the parts, and sums them."""

    def __init__(
        self, numbers: Numbers, queries: Bound, keys: Bound, batch: int, device: torch.device
    ) -> None:  # fmt: skip
        self._numbers, self._queries, self._keys = numbers, queries, keys
        self._batch, self.device = batch, device
        # Set after the kernels have run, both [B, Hq, Nq]: lse, and the gradient of a sink's score, divided by the
        # sink's weight.
        self.lse = self.drow = torch.empty(0)

    def empty_of_queries(self) -> Tensor:
        """A number for each query of each program of dq_kernel, fp32 `[W, BLOCK_M]`."""
        return self._empty(len(self._queries.work.work), self._queries.tile)

    def empty_of_keys(self) -> Tensor:
        """A number for each key of each list of dk_dv_kernel, fp32 `[W, group, BLOCK_N]`."""
        group = self._numbers.heads // self._numbers.kv_heads
        return self._empty(len(self._keys.work.work), group, self._keys.tile)

    def zeros_of_programs(self, count: int) -> Tensor:
        """`count` zeros for each program of dq_kernel, fp32 `[W, count]`."""
        return self._empty(len(self._queries.work.work), count).zero_()

    def empty_of_pairs(self, dtype: torch.dtype, *, all_live: bool) -> Tensor:
        """A number for each score, `[B, Hq, Nq, Nk]`. all_live: the kernels write all of them."""
        # The gradients in dead tiles must be 0. Zeroing took 0.6 of the 3.9 ms of a forward and a backward (8,192
        # tokens, H200), so it is left out if no tile is dead.
        numbers = self._numbers
        shape = self._batch, numbers.heads, numbers.q_len, numbers.k_len
        return (torch.empty if all_live else torch.zeros)(shape, dtype=dtype, device=self.device)

    def sums_by_head(self, part: Tensor) -> Tensor:
        """The sums of the parts of all programs of each head, `[Hq, ...]`."""
        tiles, heads = self._tiles(self._queries), self._numbers.heads
        head = _items(self._queries) // tiles % heads
        return sums_of_groups(part, head, heads, _unless_cut(self._queries, self._batch * tiles))

    def sums_by_batch_and_head(self, part: Tensor) -> Tensor:
        """The sums of the parts of all programs of each batch element and head, `[B, Hq, ...]`."""
        tiles, heads = self._tiles(self._queries), self._numbers.heads
        number = _items(self._queries) // tiles
        sums = sums_of_groups(part, number, self._batch * heads, _unless_cut(self._queries, tiles))
        return sums.view(self._batch, heads, *part.shape[1:])

    def sums_by_query(self, part: Tensor) -> Tensor:
        """The sums of the parts of all programs of each head and query, `[B, Hq, Nq]`."""
        numbers = self._numbers
        count = self._batch * numbers.heads * self._tiles(self._queries)
        sums = sums_of_groups(part, _items(self._queries), count, _unless_cut(self._queries, 1))
        return sums.view(self._batch, numbers.heads, -1)[:, :, : numbers.q_len]

    def sums_by_key(self, part: Tensor) -> Tensor:
        """The sums of the parts of all programs of each query head and key, `[B, Hq, Nk]`."""
        numbers, tiles = self._numbers, self._tiles(self._keys)
        count = self._batch * numbers.kv_heads * tiles
        sums = sums_of_groups(part, _items(self._keys), count, _unless_cut(self._keys, 1))
        by_head = sums.view(self._batch, numbers.kv_heads, tiles, -1, self._keys.tile).transpose(2, 3)
        return by_head.reshape(self._batch, numbers.heads, -1)[:, :, : numbers.k_len]

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def _tiles(self, kernel: Bound) -> int:
        """The number of tiles of queries or of keys of one head. Each tile is a work item unless it is cut."""
        numbers = self._numbers
        return -(-(numbers.k_len if kernel is self._keys else numbers.q_len) // kernel.tile)


class Sums:
    """The gradients of the score modifications' tensors in one call."""

    def __init__(self, changed: Changed, changes: Scores, call: Call, planned: Sequence[Any]) -> None:
        """planned: the result of `Kind.planned` for each score modification."""
        self._call = call
        self._kinds = list(zip(changed.all, changes.changes, strict=True))
        parts = [kind.memory(change, call, each) for (kind, change), each in zip(self._kinds, planned, strict=True)]
        self._rows, self._columns = [rows for rows, _ in parts], [columns for _, columns in parts]
        self._count = len(changed.applied)

    def of_queries(self) -> dict[str, Any]:
        """The argument `learned` of dq_kernel."""
        return memory_argument(self._rows[: self._count])

    def of_keys(self) -> dict[str, Any]:
        """The argument `learned` of dk_dv_kernel."""
        return memory_argument(self._columns[: self._count])

    def gradients(self, lse: Tensor, drow: Tensor) -> list[Tensor | None]:
        """The gradient of each tensor. drow: the gradient of a sink's score, divided by the sink's weight."""
        self._call.lse, self._call.drow = lse, drow
        return [
            gradient
            for (kind, change), rows, columns in zip(self._kinds, self._rows, self._columns, strict=True)
            for gradient in kind.gradients(change, self._call, rows, columns)
        ]


def memory_argument(parts: Sequence[tuple[Tensor, ...]]) -> dict[str, Any]:
    """The argument `learned` of a kernel, if the kernel writes any gradients of score modifications."""
    return {"learned": tuple(parts)} if any(parts) else {}


def in_order(changes: Scores, of_kind: Mapping[str, Tensor | None]) -> list[Tensor | None]:
    """The gradients in the order of all tensors. Only the first tensor of each score modification has a gradient."""
    found: list[Tensor | None] = []
    for change in changes.changes:
        if tensors := change.tensors():
            found += [of_kind.get(change.kind), *[None] * (len(tensors) - 1)]
    return found


def sink_gradient(logits: Tensor, lse: Tensor, drow: Tensor) -> Tensor:
    """The gradient of the sinks' logits, `[Hq]`.

    drow: the gradient of a sink's score, divided by the sink's weight, `[B, Hq, Nq]`.
    """
    # A query without keys contributes nothing. Its drow may be NaN, if its dlse is.
    empty = lse == -torch.inf
    weights = torch.exp(logits.float()[:, None] - lse.masked_fill(empty, torch.inf))
    return (weights * drow.masked_fill(empty, 0.0)).sum((0, 2))


def _items(kernel: Bound) -> Tensor:
    """The number of the work item of each program, int64 `[W]`."""
    return kernel.work.work[:, 0, ITEM_NUMBER.value].long()


def _unless_cut(kernel: Bound, programs: int) -> int | None:
    """`programs`, or None if items are cut into chunks: only the device has the number of programs per group then."""
    return None if kernel.work.merged is not None else programs


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

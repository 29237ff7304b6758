"""Sums the gradients of the learned tensors of score modifications.

Every program writes its part of a gradient to its own memory; the parts are summed in a fixed order, so the bits are
the same at every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseflash.backends.triton.launch.gradient_sums import memory_argument, sums_of_groups
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
        numbers = self._numbers
        return -(-(numbers.k_len if kernel is self._keys else numbers.q_len) // kernel.tile)


class Sums:
    """The gradients of the score modifications' tensors in one call."""

    def __init__(self, changed: Changed, changes: Scores, call: Call, planned: Sequence[Any]) -> None:
        self._call = call
        self._kinds = list(zip(changed.all, changes.changes, strict=True))
        pairs = zip(self._kinds, planned, strict=True)
        self._memory = [kind.memory(change, call, each) for (kind, change), each in pairs]
        self._count = len(changed.applied)

    def of_queries(self) -> dict[str, Any]:
        return memory_argument([each.rows for each in self._memory[: self._count]])

    def of_keys(self) -> dict[str, Any]:
        return memory_argument([each.columns for each in self._memory[: self._count]])

    def gradients(self, lse: Tensor, drow: Tensor) -> list[Tensor | None]:
        self._call.lse, self._call.drow = lse, drow
        return [
            gradient
            for (kind, change), written in zip(self._kinds, self._memory, strict=True)
            for gradient in kind.gradients(change, self._call, written)
        ]


def _items(kernel: Bound) -> Tensor:
    """The number of the work item of each program, int64 `[W]`."""
    return kernel.work.work[:, 0, ITEM_NUMBER.value].long()


def _unless_cut(kernel: Bound, programs: int) -> int | None:
    """`programs`, or None if items are cut into chunks: only the device has the number of programs per group then."""
    return None if kernel.work.merged is not None else programs

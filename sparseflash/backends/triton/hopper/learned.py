"""Memory for the gradients of score modifications in a Hopper backward, and their sums over its items."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparseflash.backends.triton.hopper.configs import BLOCK
from sparseflash.backends.triton.launch.gradient_sums import sums_of_groups, sums_of_runs
from sparseflash.backends.triton.persistent.backward_plan import ITEM_FIRST_KEY, ITEM_NUMBER, BackwardPlan


class HopperCall:
    """One call of a backward: allocates memory for the gradients of score modifications, and sums it."""

    def __init__(self, plan: BackwardPlan, q: Tensor, k: Tensor, lse: Tensor, *, has_lengths: bool) -> None:
        """has_lengths: whether the kernel leaves out tiles past the lengths."""
        self.lse, self.has_lengths = lse, has_lengths
        # The gradient of a sink's score over the sink's weight, `[B, Hq, Nq]`; set once the kernels have run.
        self.drow: Callable[[], Tensor]
        self._plan, self._device = plan, q.device
        self._batch, self._kv_heads, self._k_len = k.shape[:3]
        self._group = q.shape[1] // self._kv_heads

    def zeros(self, shape: Sequence[int]) -> Tensor:
        """Memory for fp32 sums of this shape for each item and query head of a group."""
        return torch.zeros(len(self._plan.work), self._group, *shape, dtype=torch.float32, device=self._device)

    def sums_by_head(self, part: Tensor) -> Tensor:
        """Sums `[items, group, ..., n]` over items and keys, as `[Hq, ...]`. They are added in the order of keys,
        whatever the order of items in the plan.
        """
        between = part.shape[2:-1]
        if not self._plan.parts:
            of_items = part.view(self._batch, self._kv_heads, -1, *part.shape[1:])
            return of_items.sum((0, 2, -1)).view(-1, *between)
        number, first_key = self._places()
        order = torch.argsort(number * self._k_len + first_key, stable=True)
        most = -(-self._k_len // BLOCK[1]) + self._plan.parts
        found = sums_of_groups(part.sum(-1)[order], number[order], self._batch * self._kv_heads, None, most)
        return found.view(self._batch, self._kv_heads * self._group, *between).sum(0)

    def sums_by_key(self, part: Tensor) -> Tensor:
        """The sums of the parts of each tile of keys: `[items, group, KEYS]` to `[B, Hq, Nk]`."""
        columns = -(-self._k_len // BLOCK[1])
        if self._plan.parts:
            number, first_key = self._places()
            tile = number * columns + first_key // BLOCK[1]
            part = sums_of_runs(part, tile, self._batch * self._kv_heads * columns, self._plan.parts)
        by_head = part.view(self._batch, self._kv_heads, columns, self._group, BLOCK[1]).transpose(2, 3)
        return by_head.reshape(self._batch, self._kv_heads * self._group, -1)[:, :, : self._k_len]

    def _places(self) -> tuple[Tensor, Tensor]:
        return self._plan.work[:, ITEM_NUMBER.value].long(), self._plan.work[:, ITEM_FIRST_KEY.value].long()

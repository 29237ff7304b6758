"""The positions of a tensor's tokens in the whole sequence, as score modifications and dropout take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparseflash.blockmask.cache import once
from sparseflash.dropout import GROUP


@dataclass(frozen=True, eq=False)
class Positions:
    """The positions of tokens that lie side by side in a tensor, moved to each device once.

    >>> positions = Positions(torch.cat([torch.arange(32, 48), torch.arange(0, 16)]), length=40)
    >>> positions.groups_on(torch.device("cpu"))
    tensor([2, 0], dtype=torch.int32)

    `tokens`: int64 `[n]`, on the CPU; unused slots may have any position, also past the `length` of the sequence.
    """

    tokens: Tensor
    length: int
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device) -> Tensor:
        """For score modifications, all within the sequence: int64 `[n]`."""
        return self._once("tokens", device, lambda: self.tokens.clamp(max=self.length - 1))

    def queries_on(self, device: torch.device) -> Tensor:
        """For dropout, of queries: int32 `[n]`."""
        return self._once("queries", device, lambda: self.tokens.int())

    def groups_on(self, device: torch.device) -> Tensor:
        """For dropout, of keys: the number of each group of 16, int32 `[ceil(n / 16)]`.

        Blocks, and so chunks and slots, are multiples of 16 tokens, so groups stay together.
        """
        return self._once("groups", device, self._groups)

    def _groups(self) -> Tensor:
        groups = self.tokens[::GROUP] // GROUP
        each = (groups[:, None] * GROUP + torch.arange(GROUP)).reshape(-1)[: len(self.tokens)]
        if not torch.equal(self.tokens, each):
            raise RuntimeError(f"keys must lie in groups of {GROUP} that are groups of the whole sequence")
        return groups.int()

    def _once(self, kind: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        return once(self._made, (kind, device), lambda: make().to(device))

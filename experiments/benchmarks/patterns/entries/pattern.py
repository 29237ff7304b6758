from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from sparseflash import BlockMask

# Tokens at which building is timed: 1M if the live tiles grow as N log N, 128K if faster, 16K if queries and keys are
# needed.
LONG, MEDIUM, CHOSEN = 1 << 20, 1 << 17, 1 << 14

Build = Callable[[int, int], BlockMask]
# The rule as a FlexAttention mask_mod, on scalars or broadcastable tensors.
Live = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


@dataclass(frozen=True)
class Pattern:
    name: str
    group: str
    rule: str  # one line, in tokens q and k, or in blocks i (of queries) and j (of keys)
    build: Build
    live: Live | None = None  # None: no formula
    tokens: int = LONG  # at which building is timed
    causal: bool = False  # full reach then means all keys up to the query's own position
    chosen: bool = False  # from data
    stack: Callable[[int, int], Sequence[BlockMask]] | None = None  # of successive layers, if they differ

    @property
    def is_variant(self) -> bool:
        """Names of further entries for a function have a comma."""
        return "," in self.name

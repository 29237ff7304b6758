"""An entry of the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from sparseflash import BlockMask

# Tokens at which building is timed: 1M if the live tiles grow no faster than N log N, 128K if they do, 16K if the
# choice needs queries and keys.
LONG, MEDIUM, CHOSEN = 1 << 20, 1 << 17, 1 << 14

Build = Callable[[int, int], BlockMask]
# live(head, q, k, tokens, block): the rule as a FlexAttention mask_mod, on scalars or broadcastable tensors.
Live = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


@dataclass(frozen=True)
class Pattern:
    """One entry: `build(tokens, block)` makes the mask."""

    name: str
    group: str
    rule: str  # one line, in tokens q and k, or in blocks i (of queries) and j (of keys)
    build: Build
    live: Live | None = None  # the same rule for FlexAttention; None if it has no formula
    tokens: int = LONG  # at which building is timed
    causal: bool = False  # full reach then means all keys up to the query's own position
    chosen: bool = False  # from data, so that density and layers depend on the data
    stack: Callable[[int, int], Sequence[BlockMask]] | None = None  # the masks of successive layers, if they differ

    @property
    def is_variant(self) -> bool:
        """Whether it is a further entry for the same function, which has a comma in its name."""
        return "," in self.name

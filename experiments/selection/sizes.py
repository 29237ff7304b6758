"""The sizes that every attention here is made for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """tokens: of a sequence; block: tokens that are chosen together; chosen: blocks of a query; tile: of the masks."""

    tokens: int
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    block: int = 16
    chosen: int = 4
    tile: int = 64

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

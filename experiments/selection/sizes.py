"""The sizes of every attention model here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """tokens: of a sequence; block: tokens chosen together; chosen: blocks for each query; tile: block size of the
    masks; index_dim: features of an indexer; taught: queries of a sequence that teach an indexer at a step.
    """

    tokens: int
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    block: int = 16
    chosen: int = 4
    tile: int = 64
    index_dim: int = 32
    taught: int = 2048

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from sparseflash import selection

WIDTH = 256  # features of a token. Projections of indexers are timed, others are not


@dataclass(frozen=True)
class Shape:
    """dense: key heads, features of a key and of a value of the dense attention that it replaces, if they are
    others.
    """

    kind: Callable[..., nn.Module]
    heads: int
    kv_heads: int
    dim: int
    options: Mapping[str, Any] = field(default_factory=dict)
    value_dim: int | None = None
    dense: tuple[int, int, int] | None = None

    @property
    def values(self) -> int:
        return self.value_dim or self.dim

    @property
    def causal(self) -> bool:
        return self.kind is not selection.VideoSparseAttention

    @property
    def shared(self) -> bool:
        return "latent" in self.options

    @property
    def of_dense(self) -> tuple[int, int, int]:
        return self.dense or (self.kv_heads, self.dim, self.values)


PUBLISHED = {
    # Yuan et al., 2025, section 4.1: 64 query and 4 key heads; blocks of 64, 16 chosen, window 512.
    "NSA": Shape(selection.NativeSparseAttention, 64, 4, 192, {"value_dim": 128}, 128),
    # Lu et al., 2025, section 3.1: blocks of 512, 3 chosen, as many key heads as query heads.
    "MoBA": Shape(selection.MixtureOfBlocks, 32, 32, 128, {"block": 512, "chosen": 3}),
    # Lai et al., 2026: MiniMax-M3.
    "MSA": Shape(selection.BlockSelection, 64, 4, 128),
    # DeepSeek-V3.2: 128 heads read latent keys of 576 features, whose first 512 are the values. The dense attention of
    # training has heads of its own.
    "DSA": Shape(selection.TokenSelection, 128, 1, 576, {"latent": selection.Latent()}, 512, (128, 192, 128)),
    # Qwen3.8-Flash-Next: 512 spans of 4 tokens.
    "QSA": Shape(selection.SpanSelection, 24, 2, 256),
    # Zhang et al., 2025, section 2: cubes of 4 x 4 x 4, 32 chosen; the heads of Wan2.1-1.3B.
    "VSA": Shape(selection.VideoSparseAttention, 12, 12, 128),
}
LENGTHS = (8192, 16_384, 32_768, 65_536)
VIDEOS = {8192: (8, 32, 32), 16_384: (16, 32, 32), 32_768: (32, 32, 32), 65_536: (16, 64, 64), 128: (2, 8, 8)}

_SMALL_INDEXER = {"index_dim": 16}
SMALL = {
    "NSA": Shape(
        selection.NativeSparseAttention, 4, 2, 24,
        {"value_dim": 16, "block": 16, "chosen": 4, "compression": 16, "stride": 8, "window": 32}, 16,
    ),
    "MoBA": Shape(selection.MixtureOfBlocks, 2, 2, 16, {"block": 16, "chosen": 3}),
    "MSA": Shape(selection.BlockSelection, 4, 2, 16, {"block": 16, "chosen": 3, **_SMALL_INDEXER}),
    "DSA": Shape(
        selection.TokenSelection, 4, 1, 24,
        {"latent": selection.Latent(16, 8, 8, 8, 16), "chosen": 16, "index_heads": 2, **_SMALL_INDEXER}, 16, (4, 16, 8),
    ),
    "QSA": Shape(selection.SpanSelection, 4, 2, 16, {"chosen": 4, "index_heads": 2, **_SMALL_INDEXER}),
    "VSA": Shape(selection.VideoSparseAttention, 2, 2, 16, {"chosen": 2, "cube": (2, 4, 4)}),
}  # fmt: skip

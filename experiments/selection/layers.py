"""The layers that are compared, by name, at the same sizes and with the same number of keys a query."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from experiments.selection import fixed
from experiments.selection.fixed import Fixed
from experiments.selection.sizes import Sizes
from sparseflash import BlockMask, masks, selection


def _layer(kind: Callable[..., nn.Module], sizes: Sizes, **options: Any) -> nn.Module:
    return kind(sizes.width, sizes.heads, sizes.kv_heads, head_dim=sizes.dim, qk_norm=True, **options)


def _fixed(pattern: Callable[[Sizes], BlockMask]) -> Callable[[Sizes], nn.Module]:
    return lambda sizes: _layer(partial(Fixed, pattern(sizes)), sizes)


def _native(sizes: Sizes) -> nn.Module:
    """With the paper's proportions: blocks of 64, compressed by 32 every 16, and a window of half as many keys."""
    first, last = (1, 2) if sizes.chosen > 3 else (0, 1)
    return _layer(
        selection.NativeSparseAttention, sizes, block=sizes.block, chosen=sizes.chosen, stride=sizes.block // 4,
        compression=sizes.block // 2, window=sizes.block * sizes.chosen // 2, first=first, last=last,
    )  # fmt: skip


def _moba(sizes: Sizes) -> nn.Module:
    return _layer(selection.MixtureOfBlocks, sizes, chosen=sizes.chosen, block=sizes.block)


def _blocks(sizes: Sizes) -> nn.Module:
    return _layer(
        selection.BlockSelection, sizes, chosen=sizes.chosen, block=sizes.block, index_dim=sizes.index_dim,
        taught=sizes.taught,
    )  # fmt: skip


def _indexed(kind: Callable[..., nn.Module], span: int) -> Callable[[Sizes], nn.Module]:
    """Chooses spans of tokens by an indexer."""
    return lambda sizes: _layer(
        kind, sizes, chosen=sizes.chosen * sizes.block // span, index_heads=sizes.heads, index_dim=sizes.index_dim,
        taught=sizes.taught,
    )  # fmt: skip


class Video(selection.VideoSparseAttention):
    """A sequence as a video of one row a frame: a cube is a run of neighbouring tokens."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(
            sizes.width, sizes.heads, sizes.kv_heads, head_dim=sizes.dim, qk_norm=True, cube=(1, 1, sizes.block),
            chosen=sizes.chosen,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, (1, 1, x.shape[1]))


LAYERS: dict[str, Callable[[Sizes], nn.Module]] = {
    "dense": _fixed(fixed.dense),
    "window": _fixed(fixed.window),
    "strided": _fixed(fixed.strided),
    "NSA": _native,
    "MoBA": _moba,
    "shared blocks": _blocks,
    "DSA": _indexed(selection.TokenSelection, 1),
    "QSA": _indexed(selection.SpanSelection, 4),
    "VSA": Video,
}


def layer_of(way: str, sizes: Sizes) -> nn.Module:
    if way in LAYERS:
        return LAYERS[way](sizes)
    if not {":", "("} & set(way):
        raise ValueError(
            f"way must be one of {', '.join(LAYERS)}, or a pattern such as 'streaming(n, window=64, sink=4)' or "
            f"mine.py:rule; got {way!r}."
        )
    return _fixed(partial(fixed.of_text, way))(sizes)


def read_by(layer: nn.Module, made: Any, sizes: Sizes, queries: int) -> BlockMask:
    if isinstance(layer, Fixed):
        return layer.of_all
    if isinstance(made, BlockMask):
        return made
    return masks.selected_keys(
        made[:, :, -queries:], k_len=sizes.tokens, block=sizes.tile, causal=True, group=sizes.heads // made.shape[1],
        span=getattr(layer, "block", getattr(layer, "span", 1)),
    )  # fmt: skip
